"""``SamplingParams.extra_args``: a read-only mapping, checked on the caller's thread, refused where nobody looks at it."""

import copy
import pickle
import threading
from typing import Any

import pytest

from minivllm_plugin import SamplingParams
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.errors import ConfigError, ContextWindowExceededError, InvalidRequestError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.testing import LogitsRunner, scripted_llm


class Stateless:
    """A processor that changes nothing."""

    argmax_invariant = False

    def __init__(self) -> None:
        self.validated: list[tuple[Any, threading.Thread]] = []

    def validate(self, value: Any, params: SamplingParams) -> None:
        self.validated.append((value, threading.current_thread()))
        if value == "bad":
            raise ValueError("it is bad")
        if value == "broken":
            raise KeyError("oh")
        if value == "window":
            raise ContextWindowExceededError("too long")

    def new_state(self, request: Any) -> None:
        return None

    def apply(self, logits: Any, rows: Any) -> None:
        return None


class Plugin:
    minivllm_name = "acme"

    def __init__(self) -> None:
        self.processor = Stateless()

    @hookimpl
    def minivllm_register_logits_processors(self, registry: Any) -> None:
        registry.add("nothing", self.processor)


def test_they_are_read_only_and_independent_of_what_was_given() -> None:
    given = {"a": [1], "b": None}
    params = SamplingParams(extra_args=given)
    given["c"] = 3
    assert params.extra_args == {"a": [1]}
    with pytest.raises(TypeError):
        params.extra_args["d"] = 1  # type: ignore[index]
    assert params.replace(top_k=3).extra_args == {"a": [1]}
    assert SamplingParams(extra_args={}).extra_args is None
    assert SamplingParams(extra_args={"a": None}) == SamplingParams()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda params: pickle.loads(pickle.dumps(params))])
def test_params_with_them_can_be_copied_hashed_and_sent(copied: Any) -> None:
    params = SamplingParams(extra_args={"a": {"x": [1, 2]}}, top_k=3, stop=["x"])
    assert copied(params) == params
    assert hash(copied(params)) == hash(params)
    with pytest.raises(TypeError):
        copied(params).extra_args["d"] = 1


@pytest.mark.parametrize("wrong", ["text", 3, ["a"], {1: 2}, {"": 2}])
def test_anything_else_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="extra_args must be a dictionary"):
        SamplingParams(extra_args=wrong)


def test_names_and_values_are_checked_where_the_request_is_made() -> None:
    plugin = Plugin()
    llm, runner = scripted_llm(runner=LogitsRunner, vocab_size=50, options={"plugins": [plugin]})
    with llm:
        for value, message in (("bad", "it is bad"), ("broken", r"KeyError: 'oh'")):
            with pytest.raises(InvalidRequestError, match=rf"logits processor 'nothing' of plugin 'acme' refuses.*{message}"):
                llm.submit([1], SamplingParams(extra_args={"nothing": value}))
        with pytest.raises(ContextWindowExceededError, match="too long"):
            llm.submit([1], SamplingParams(extra_args={"nothing": "window"}))
        with pytest.raises(InvalidRequestError, match=r"unknown name 'nothin' in extra_args; known are nothing\b"):
            llm.generate([[1], [2]], [SamplingParams(), SamplingParams(extra_args={"nothin": 1})], use_tqdm=False)
        assert runner.num_calls == 0  # nothing was started
        assert llm.generate([1], SamplingParams(extra_args={"nothing": 1}, max_tokens=2), use_tqdm=False)[0].finished
    assert {thread for _, thread in plugin.processor.validated} == {threading.current_thread()}


def test_an_engine_without_plugins_takes_none() -> None:
    llm, _ = scripted_llm()
    with llm, pytest.raises(InvalidRequestError, match="unknown name 'nothing' in extra_args; known are "):
        llm.submit([1], SamplingParams(extra_args={"nothing": 1}))


def test_a_runner_without_logits_refuses_what_it_could_not_honour() -> None:
    llm, runner = scripted_llm(options={"plugins": [Plugin()]})
    with llm, pytest.raises(InvalidRequestError, match="nothing in this engine looks at 'nothing'"):
        llm.generate([1], SamplingParams(extra_args={"nothing": 1}), use_tqdm=False)
    assert runner.num_calls == 0


def test_an_engine_driven_by_hand_refuses_names_that_nobody_looks_at() -> None:
    from minivllm_plugin.engine.admission import Limits
    from minivllm_plugin.engine.scheduler import Scheduler

    scheduler = Scheduler(4, 64, 32, 4, 0)
    engine = LLMEngine(scheduler, LogitsRunner.for_scheduler(scheduler, vocab_size=50), Limits(50, 100))
    with pytest.raises(InvalidRequestError, match="nothing in this engine looks at 'x'"):
        engine.add_prompt([1], SamplingParams(extra_args={"x": 1}))
    assert scheduler.is_finished()


def test_one_name_cannot_belong_to_two_plugins_across_the_two_registries() -> None:
    class Criterion(Stateless):
        def check(self, context: Any) -> str | None:
            return None

    extensions = Extensions.builtin()
    both = Criterion()
    with extensions.logits.owned_by("acme"), extensions.stopping.owned_by("acme"):
        extensions.logits.add("both", both)
        extensions.stopping.add("both", both)  # one plugin may use its name in both
    with extensions.stopping.owned_by("other"), pytest.raises(ConfigError, match="'both' of plugin 'acme'"):
        extensions.stopping.add("both", Criterion())


@pytest.mark.parametrize(
    ("extension", "message"),
    [
        (Stateless, "is a class: add an instance"),
        (object(), "must say argmax_invariant"),
        (type("NoApply", (), {"argmax_invariant": True, "validate": print, "new_state": print})(), r"has no apply\(\)"),
    ],
    ids=["class", "object", "without apply"],
)
def test_what_is_no_processor_is_refused_when_it_is_added(extension: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Extensions.builtin().logits.add("x", extension)
