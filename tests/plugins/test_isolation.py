"""Whatever one plugin raises or answers: the others, the requests and the engine go on, and who did it is said once."""

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from plugin_bench import Bench, answering, make_plugin, prompts, raising

from minivllm_plugin.errors import EngineDeadError, PluginError, RequestRejectedError
from minivllm_plugin.hookspecs import OBSERVER_HOOKS, hookimpl
from minivllm_plugin.plugins.discovery import LoadedPlugin
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import scripted_llm
from minivllm_plugin.views import Admit, Budget, Reject


class Mute(Exception):  # noqa: N818  # its name is no matter
    """An exception whose text raises."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


ERRORS = [RuntimeError("boom"), Mute(), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()]
OBSERVERS = [hook.removeprefix("minivllm_") for hook in OBSERVER_HOOKS if hook != "minivllm_engine_error"]


def name(value: object) -> str:
    return type(value).__name__


# --- observers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", OBSERVERS)
def test_an_observer_that_raises_disturbs_nobody_and_is_taken_out_after_five_in_a_row(
    hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad = raising(RuntimeError("boom"))
    seen: list[int] = []
    good = answering(lambda: seen.append(1))
    bench = Bench(plugins=[make_plugin(**{hook: bad}), make_plugin("good", **{hook: good})])
    for prompt in prompts(8):
        bench.add(prompt, 8)
    bench.finish()
    bench.check_tokens()
    assert len(bad.calls) == 5  # type: ignore[attr-defined]
    assert len(good.calls) >= 8  # type: ignore[attr-defined]
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "'acme'" in caplog.text
    assert bench.report().errors == (f"{hook}: 5 errors in a row",)
    assert bench.report("good").errors == ()


def test_a_success_starts_the_count_anew() -> None:
    calls = itertools.count()

    def step_started() -> None:
        if next(calls) % 5 != 4:
            raise RuntimeError("four times of five")

    bench = Bench(plugins=[make_plugin(step_started=step_started)])
    bench.add([1, 2, 3], 40)
    bench.finish()
    assert next(calls) == 40
    assert bench.report().errors == ("step_started: 32 errors",)


def test_the_log_names_the_distribution_and_holds_the_traceback_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    loaded = LoadedPlugin("acme", make_plugin(step_started=raising(ValueError("boom"))), "acme-dist", "1.2", "installed")
    bench.plugins._collection.add(loaded, is_wanted=True)
    bench.plugins._calls = bench.plugins._collection.call_lists()
    bench.engine.attach(bench.plugins)
    bench.add([1, 2, 3], 9)
    bench.finish()
    assert caplog.text.count("'acme' (acme-dist 1.2) failed in minivllm_step_started") == 1
    assert caplog.text.count("Traceback") == 1
    assert caplog.text.count("is not called any more (5 errors in a row)") == 1


@pytest.mark.parametrize("error", ERRORS, ids=name)
@pytest.mark.parametrize("hook", ["request_queued", "step_started", "step_finished", "blocks_changed", "request_finished"])
def test_no_kind_of_exception_of_an_observer_ends_the_engine(hook: str, error: BaseException) -> None:
    llm, _ = scripted_llm(options={"plugins": [make_plugin(**{hook: raising(error)})]})
    with llm:
        for _ in range(3):
            assert len(llm.submit([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True)).result().outputs[0].token_ids) == 3
        assert llm.is_healthy
        assert len(llm.plugins()[0].errors) == 1


def test_the_users_own_interrupt_passes_through_a_hook() -> None:
    bench = Bench(plugins=[make_plugin(step_started=raising(KeyboardInterrupt()))])
    bench.add([1, 2, 3])
    with pytest.raises(KeyboardInterrupt):
        bench.step()


# --- policies that raise ------------------------------------------------------------------------------------------------

DECISIONS = ["admit", "order_waiting", "step_budget", "select_victims", "order_eviction"]


def crowded(policy: object, **options: Any) -> Bench:
    """A bench whose pool is too small for its requests, so that every decision comes up many times."""
    bench = Bench(policies=[policy], num_blocks=8, max_num_sequences=3, **options)
    for number, prompt in enumerate(prompts(10, 7)):
        bench.add(prompt, 15, request_id=f"r{number}")
    bench.finish()
    bench.check_tokens()
    return bench


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize("error", ERRORS[:3], ids=name)
def test_a_policy_that_raises_is_taken_out_after_three(decision: str, error: BaseException) -> None:
    hook = raising(error)
    bench = crowded(make_plugin(**{decision: hook}))
    assert len(hook.calls) == 3  # type: ignore[attr-defined]
    assert bench.report().errors == (f"{decision}: 3 errors",)


def test_errors_of_a_policy_count_also_when_they_are_not_in_a_row() -> None:
    answers: Iterator[Any] = iter([None, 1, None, "x", None, None, [], None])
    hook = answering(lambda: next(answers))
    crowded(make_plugin(step_budget=hook))
    assert len(hook.calls) == 7  # type: ignore[attr-defined]


def test_the_decision_of_one_that_raises_is_the_engines_and_the_next_policy_is_asked_once_it_is_out() -> None:
    first, second = raising(RuntimeError("boom")), answering(lambda: Budget(num_sequences=1))
    plans: list[Any] = []
    bench = Bench(
        plugins=[make_plugin("watch", step_started=plans.append)],
        policies=[make_plugin("first", step_budget=first), make_plugin("second", step_budget=second)],
    )
    for prompt in prompts(6):
        bench.add(prompt, 8)
    bench.finish()
    assert [plan.state.num_running for plan in plans[:3]] == [4, 4, 4]  # the engine's own limit, thrice
    assert len(first.calls) == 3  # type: ignore[attr-defined]
    assert len(second.calls) == len(plans) - 3  # type: ignore[attr-defined]
    assert bench.report("second").errors == ()


# --- nonsense for answers -----------------------------------------------------------------------------------------------


class StringLike(str):
    """A string that breaks where strings are used."""

    __slots__ = ()

    def __hash__(self) -> int:
        raise RuntimeError("no hash")


class BadRepr:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def endless(value: object) -> Callable[[], Any]:
    return lambda: itertools.repeat(value)


def exploding() -> Iterator[str]:
    yield "r0"
    raise RuntimeError("in the middle")


SHAPELESS: dict[str, Callable[[], Any]] = {
    "text": lambda: "r0",
    "bytes": lambda: b"r0",
    "true": lambda: True,
    "false": lambda: False,
    "zero": lambda: 0,
    "nan": lambda: math.nan,
    "object": object,
    "class": lambda: Admit,
    "function": lambda: print,
    "mock": Mock,
    "magic mock": MagicMock,
    "no repr": BadRepr,
    "nested": lambda: [["r0"]],
    "none in a list": lambda: [None, "r0"],
    "numbers": lambda: [0.5, 1.5],
    "bools": lambda: [True, False],
    "foreign": lambda: ["nobody", "r0", "r0", "request-7"],
    "foreign numbers": lambda: [-1, 10**30, 99, 0, 0],
    "empty": list,
    "dictionary": lambda: {"r0": 1},
    "set": lambda: {"r0", "r1"},
    "hashless": lambda: [StringLike("r0"), "r1"],
    "endless": endless("r0"),
    "endless numbers": endless(3),
    "exploding": exploding,
    "negative budget": lambda: Budget(-5, -5, -5),
    "zero budget": lambda: Budget(0, 0, 0),
    "huge budget": lambda: Budget(10**30, 10**30, 10**30),
    "fraction budget": lambda: Budget(0.5),  # type: ignore[arg-type]
    "true budget": lambda: Budget(True, True, True),
    "text budget": lambda: Budget("many"),  # type: ignore[arg-type]
    "mocked budget": lambda: MagicMock(spec=Budget),
    "tuple budget": lambda: (1, 2, 3),
    "reject without text": lambda: Reject(7),  # type: ignore[arg-type]
    "reject until nan": lambda: Reject("no", math.nan),
    "reject until never": lambda: Reject("no", math.inf),
    "reject backwards": lambda: Reject("no", -1.0),
    "reject until true": lambda: Reject("no", True),
}


@pytest.mark.parametrize("decision", DECISIONS)
@pytest.mark.parametrize("answer", SHAPELESS.values(), ids=SHAPELESS)
def test_no_answer_of_a_policy_makes_the_engine_wrong(decision: str, answer: Callable[[], Any]) -> None:
    hook = answering(answer)
    bench = crowded(make_plugin(**{decision: hook}))
    assert hook.calls  # type: ignore[attr-defined]
    assert all(seq.finish_reason == "length" for seq in bench.sequences)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("answer", SHAPELESS.values(), ids=SHAPELESS)
def test_no_answer_makes_the_classic_mode_wrong(caching: bool, answer: Callable[[], Any]) -> None:
    crowded(make_plugin(**{name: answering(answer) for name in DECISIONS}), chunked=False, caching=caching)


@pytest.mark.parametrize("verdict", [Reject("no", retry_after=None), Reject("no", 0), Reject("no", 2.5)])
def test_a_proper_rejection_reaches_the_caller_whole(verdict: Reject) -> None:
    llm, _ = scripted_llm(options={"policies": [make_plugin(admit=answering(lambda: verdict))]})
    with llm:
        with pytest.raises(RequestRejectedError, match="refused by policy 'acme': no") as caught:
            llm.submit([1, 2, 3]).result()
        assert caught.value.retry_after == verdict.retry_after
        with pytest.raises(RequestRejectedError):  # nothing of it is left: its id can be used again
            llm.submit([1, 2, 3], request_id="request-0").result()
        assert llm.plugins()[0].errors == ()


# --- cache_salt -----------------------------------------------------------------------------------------------------------

SAME = [1, 2, 3, 4, 5, 6, 7, 8, 9]


def cached(bench: Bench, **options: Any) -> int:
    seq = bench.add(SAME, 1, **options)
    bench.finish()
    return seq.prompt_cached_tokens or 0


@pytest.mark.parametrize("error", ERRORS[:3], ids=name)
def test_a_salt_that_raises_fails_closed_and_is_never_taken_out(error: BaseException) -> None:
    hook = raising(error)
    bench = Bench(policies=[make_plugin(cache_salt=hook)])
    assert [cached(bench) for _ in range(9)] == [0] * 9
    assert len(hook.calls) == 9  # type: ignore[attr-defined]
    assert bench.report().errors == ("cache_salt: 9 errors",)


@pytest.mark.parametrize("answer", [7, b"x", True, ["x"], object, pytest.param(MagicMock(), id="mock"), math.nan], ids=repr)
def test_a_salt_of_another_type_fails_closed(answer: object) -> None:
    bench = Bench(policies=[make_plugin(cache_salt=answering(lambda: answer))])
    assert [cached(bench) for _ in range(4)] == [0] * 4


def test_one_failing_salt_of_two_fails_closed() -> None:
    other = answering(lambda: "same")
    bench = Bench(policies=[make_plugin("good", cache_salt=other), make_plugin("bad", cache_salt=raising(RuntimeError()))])
    assert [cached(bench) for _ in range(4)] == [0] * 4


def test_a_caller_cannot_spell_the_salt_that_a_policy_makes() -> None:
    salts = {"victim": "secret", "attacker": None}
    bench = Bench(policies=[make_plugin(cache_salt=lambda request: salts[request.tenant])])
    victim = bench.add(SAME, 1, metadata={"tenant": "victim"})
    bench.finish()
    assert victim.cache_salt is not None
    assert cached(bench, metadata={"tenant": "attacker"}, cache_salt=victim.cache_salt) == 0
    assert cached(bench, metadata={"tenant": "victim"}) == 8


def test_salts_of_several_policies_cannot_be_confused() -> None:
    parts: dict[str, tuple[str | None, str | None]] = {
        "1": ("a", "b"),
        "2": ("ab", None),
        "3": (None, "ab"),
        "4": ("a:1:b", None),
    }
    first = make_plugin("p", cache_salt=lambda request: parts[request.tenant][0])
    second = make_plugin("q", cache_salt=lambda request: parts[request.tenant][1])
    bench = Bench(policies=[first, second])
    seen = [bench.add(SAME, 1, metadata={"tenant": tenant}).cache_salt for tenant in parts]
    assert len(set(seen)) == 4


# --- plugin_errors="raise" --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["request_queued", "step_started", "step_finished", "blocks_changed", "request_finished"])
def test_raise_ends_the_engine_and_no_waiter_hangs(hook: str) -> None:
    options = {"plugins": [make_plugin(**{hook: raising(Mute())})], "plugin_errors": "raise"}
    llm, _ = scripted_llm(options=options)
    with pytest.raises(EngineDeadError) as caught:
        llm.submit([1, 2, 3], SamplingParams(max_tokens=2)).result(timeout=20)
    assert isinstance(caught.value.__cause__, PluginError)
    assert f"'acme' failed in minivllm_{hook}: Mute" in str(caught.value.__cause__)
    assert not llm.is_healthy
    llm.close()


@pytest.mark.parametrize("hook", ["admit", "cache_salt", "step_budget"])
def test_raise_holds_for_policies(hook: str) -> None:
    policy = make_plugin(**{hook: answering(lambda: 7)})
    llm, _ = scripted_llm(options={"policies": [policy], "plugin_errors": "raise"})
    with pytest.raises(EngineDeadError, match=f"minivllm_{hook}: TypeError"):
        llm.submit([1, 2, 3], SamplingParams(max_tokens=2)).result(timeout=20)
    llm.close()


# --- what would be called and do nothing ------------------------------------------------------------------------------


class AsyncObserver:
    @hookimpl
    async def minivllm_step_started(self, plan: Any) -> None: ...


class YieldingObserver:
    @hookimpl
    def minivllm_step_started(self, plan: Any) -> Iterator[None]:
        yield


class Wrapper:
    @hookimpl(wrapper=True)
    def minivllm_step_started(self, plan: Any) -> Iterator[None]:
        yield


class OldWrapper:
    @hookimpl(hookwrapper=True)
    def minivllm_configure(self, config: Any) -> Iterator[None]:
        yield


class PolicyWrapper:
    @hookimpl(wrapper=True)
    def minivllm_admit(self, request: Any) -> Iterator[None]:
        return (yield)


class RegisterWrapper:
    @hookimpl(wrapper=True)
    def minivllm_register_models(self, registry: Any) -> Iterator[None]:
        return (yield)


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (AsyncObserver(), "must not be async"),
        (YieldingObserver(), "must not be a generator"),
        (Wrapper(), "must not be a wrapper"),
        (OldWrapper(), "must not be a wrapper"),
        (PolicyWrapper(), "must not be a wrapper"),
        (RegisterWrapper(), "historic incompatible with"),
    ],
    ids=name,
)
def test_functions_that_could_not_work_are_refused(plugin: object, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        Bench(plugins=[plugin])


def test_a_policy_may_answer_with_a_generator() -> None:
    def order_waiting(waiting: Any) -> Iterator[str]:
        yield from (request.request_id for request in reversed(waiting))

    bench = crowded(make_plugin(order_waiting=order_waiting))
    assert bench.report().errors == ()
    assert bench.report().num_calls > 3


def test_arguments_with_defaults_are_passed_and_unknown_ones_left_out() -> None:
    seen: list[Any] = []

    def request_queued(request: Any, future: str = "default", state: Any = None) -> None:
        seen.append((request.request_id, future, state.num_waiting))

    bench = Bench(plugins=[make_plugin(request_queued=request_queued)])
    bench.add([1, 2], request_id="a")
    assert seen == [("a", "default", 1)]
