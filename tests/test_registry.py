"""The registry: one live engine a name, however many ask at once; what is dead or closed is replaced. (Kinds: E03, E05.)"""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import minivllm_plugin
from minivllm_plugin import LLM, SamplingParams, registry
from minivllm_plugin.errors import ConfigError, EngineClosedError, EngineDeadError, ModelNotFoundError
from minivllm_plugin.testing import scripted_llm

FIVE = SamplingParams(max_tokens=5, ignore_eos=True)


class Factory:
    """Stands for the class LLM in the registry: notes what is asked for and gives scripted engines."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failures: list[Exception] = []
        self.runner_options: dict[str, Any] = {}
        self.made: list[LLM] = []

    def __call__(self, model: str, **options: Any) -> LLM:
        self.asked.append((model, options))
        assert self.gate.wait(30)
        if self.failures:
            raise self.failures.pop(0)
        self.made.append(scripted_llm(**self.runner_options)[0])
        return self.made[-1]


@pytest.fixture
def factory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Factory]:
    monkeypatch.setattr(registry, "_engines", {})
    monkeypatch.setattr(registry, "_options", {})
    factory = Factory()
    monkeypatch.setattr(registry, "LLM", factory)
    yield factory
    factory.gate.set()
    registry.close_all()
    assert registry.loaded() == {}
    assert not any(llm.is_healthy for llm in factory.made)


def test_first_callers_at_a_barrier_share_one_load(factory: Factory) -> None:
    barrier = threading.Barrier(8)

    def ask(_: int) -> tuple[LLM, list[int]]:
        barrier.wait(30)
        llm = registry.get_llm("one")
        return llm, llm.generate([1, 2, 3], FIVE, use_tqdm=False)[0].outputs[0].token_ids

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(8)))
    assert len({id(llm) for llm, _ in answers}) == len(factory.asked) == 1
    assert all(tokens == answers[0][1] for _, tokens in answers)
    assert registry.loaded() == {"one": answers[0][0]}
    assert minivllm_plugin.get_llm("one") is answers[0][0]


def test_a_slow_load_of_one_name_holds_nobody_else_up(factory: Factory) -> None:
    factory.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(registry.get_llm, "slow")
        while not factory.asked:
            pass
        assert registry.loaded() == {}
        factory.gate.set()
        assert registry.get_llm("other") is not slow.result(30)
    assert set(registry.loaded()) == {"slow", "other"}


def test_a_failing_load_reaches_everybody_who_waits_and_is_tried_again(factory: Factory) -> None:
    factory.gate.clear()
    factory.failures = [ModelNotFoundError("no model is called 'one'")]
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(registry.get_llm, "one") for _ in range(4)]
        while not factory.asked:
            pass
        factory.gate.set()
        errors = [call.exception(30) for call in calls]
    assert any(isinstance(error, ModelNotFoundError) for error in errors)  # whoever came later may have got the second try
    assert all(error is None or isinstance(error, ModelNotFoundError) for error in errors)
    assert registry.get_llm("one").is_healthy


def test_a_dead_engine_is_replaced_by_the_next_call(factory: Factory) -> None:
    factory.runner_options = {"fail_on_call": 1}
    dying = registry.get_llm("one", max_num_sequences=3)
    with pytest.raises(EngineDeadError, match="fails on purpose"):
        dying.generate([1], FIVE, use_tqdm=False)
    assert registry.loaded() == {}
    factory.runner_options = {}
    fresh = registry.get_llm("one")
    assert fresh is not dying
    assert len(fresh.generate([1], FIVE, use_tqdm=False)[0].outputs[0].token_ids) == 5
    assert factory.asked == [("one", {"max_num_sequences": 3})] * 2  # with the options it had


def test_a_closed_engine_is_replaced_and_close_forgets_its_options(factory: Factory) -> None:
    first = registry.get_llm("one", max_num_sequences=3)
    first.close()
    second = registry.get_llm("one")
    assert second is not first
    registry.close("one")
    registry.close("one")
    registry.close("never heard of")
    with pytest.raises(EngineClosedError):
        second.submit([1], FIVE)
    registry.get_llm("one")
    assert [options for _, options in factory.asked] == [{"max_num_sequences": 3}] * 2 + [{}]


def test_options_are_for_the_first_use(factory: Factory) -> None:
    registry.configure("one", max_num_sequences=3)
    llm = registry.get_llm("one")
    assert registry.get_llm("one", max_num_sequences=3) is llm
    for other in ({"max_num_sequences": 4}, {"max_num_sequences": 3, "seed": 1}):
        with pytest.raises(ConfigError, match=r"'one' is loaded with other options already; call .*close\('one'\) first"):
            registry.get_llm("one", **other)
        with pytest.raises(ConfigError, match="other options"):
            registry.configure("one", **other)
    with pytest.raises(ConfigError, match=r"max_num_seqs.*max_num_sequences"):
        registry.get_llm("two", max_num_seqs=3)
    assert factory.asked == [("one", {"max_num_sequences": 3})]


def test_first_callers_with_different_options_never_get_each_others(factory: Factory) -> None:
    barrier = threading.Barrier(8)

    def ask(number: int) -> object:
        barrier.wait(30)
        try:
            return registry.get_llm("one", max_num_sequences=number)
        except ConfigError:
            return None

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(1, 9)))
    [(_, options)] = factory.asked
    assert [number for number, llm in enumerate(answers, 1) if llm is not None] == [options["max_num_sequences"]]


def test_an_alias_names_another_model(factory: Factory) -> None:
    registry.configure("exact", model="smollm2-135m", dtype="float32")
    registry.get_llm("exact")
    assert factory.asked == [("smollm2-135m", {"dtype": "float32"})]
    assert set(registry.loaded()) == {"exact"}


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M", " smollm2-135m ", "minivllm/smollm2-135m"])
def test_the_spellings_of_a_catalog_name_are_one_engine(name: str) -> None:
    assert registry._key(name) == "smollm2-135m"


@pytest.mark.parametrize("name", [[], None, 5])
def test_a_name_that_is_none_is_a_config_error(name: Any) -> None:
    for call in (registry.get_llm, registry.close, registry.configure):
        with pytest.raises(ConfigError):
            call(name)
