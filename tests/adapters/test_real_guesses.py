"""Guessed tokens on the real SmolLM2-135M, through LiteLLM: every kind of request gets what it gets without them, alone,
streamed, and beside one whose guesses come true; and so do the texts that are embedded meanwhile."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import litellm
import pytest
from told import told

from minivllm_adapters.handler import MinivllmProvider
from minivllm_plugin import LLM
from minivllm_plugin.events import StepReport
from minivllm_plugin.plugins import hookimpl

pytestmark = [pytest.mark.model, pytest.mark.slow]

REFRAIN = "one two three, "
MESSAGES = [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": REFRAIN * 4 + "one"}]
TEXTS = [REFRAIN * 9, "Paris", "The weather of Paris and Rome. " * 5]
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
CITIES = {
    "type": "object",
    "properties": {"cities": {"type": "array", "items": {"enum": ["Paris", "Rome"]}, "minItems": 9, "maxItems": 9}},
    "required": ["cities"],
    "additionalProperties": False,
}
GUESSED: dict[str, dict[str, Any]] = {
    "plain": {},
    "drawn": {"temperature": 0.8, "top_p": 0.9, "seed": 5},
    "several drawn": {"temperature": 0.9, "seed": 7, "n": 3},
    "a stop string": {"stop": ["nowhere", "two three, one two three, one two three, one two"], "max_tokens": 90},
    "cut": {"max_tokens": 13},
    "a tool that may be called": {"tools": TOOLS},
}
NOT_GUESSED: dict[str, dict[str, Any]] = {
    "log-probabilities": {"logprobs": True, "top_logprobs": 2},
    "a penalty": {"frequency_penalty": 0.4, "repetition_penalty": 1.05},
    "a bias": {"logit_bias": {"253": 1.0}},
    "the least tokens": {"min_tokens": 20},
    "a schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITIES}}, "max_tokens": 90},
    "an expression": {"guided_regex": "( two three,| one| four)+"},
    "a forced call": {"tools": TOOLS, "tool_choice": "required", "max_tokens": 90},
    "thoughts": {"thinking_token_budget": 4},
}
KINDS = {**GUESSED, **NOT_GUESSED}


NOTHING = SimpleNamespace(content=())
LONG: dict[str, Any] = {"max_tokens": 600, "ignore_eos": True}


class Company:
    """Sees which requests gained how many tokens in each step."""

    def __init__(self) -> None:
        self.steps: list[Counter[str]] = []

    @hookimpl
    def minivllm_step_finished(self, report: StepReport) -> None:
        self.steps.append(Counter(report.request_ids))


class Registry:
    """``minivllm/plain`` guesses nothing; ``minivllm/guessing`` does."""

    def __init__(self, model: str) -> None:
        self.company = Company()
        self.llms = {"plain": LLM(model, num_speculative_tokens=0), "guessing": LLM(model, plugins=[self.company])}

    def get_llm(self, name: str) -> LLM:
        return self.llms[name]

    def loaded(self) -> dict[str, LLM]:
        return self.llms

    def accepted(self) -> int:
        return self.llms["guessing"].snapshot().num_accepted_tokens


@pytest.fixture(scope="module")
def registry(smollm2_gguf: Path) -> Iterator[Registry]:
    registry = Registry(str(smollm2_gguf))
    yield registry
    assert registry.llms["plain"].snapshot().num_drafted_tokens == 0
    for llm in registry.llms.values():
        llm.close()


@pytest.fixture(autouse=True)
def _registered(registry: Registry) -> None:
    litellm.custom_provider_map.append(_entry(registry))


def _entry(registry: Any) -> Any:
    return {"provider": "minivllm", "custom_handler": MinivllmProvider(registry)}


def _ask(engine: str, kind: str, **more: Any) -> Any:
    usual = {"messages": MESSAGES, "continue_final_message": True, "temperature": 0, "max_tokens": 40}
    return litellm.completion(model=f"minivllm/{engine}", **{**usual, **KINDS[kind], **more})


def _whole(engine: str, kind: str) -> Any:
    answer = _ask(engine, kind)
    logprobs = [entry for choice in answer.choices for entry in (getattr(choice, "logprobs", None) or NOTHING).content]
    return _scored(answer, logprobs)


def _streamed(engine: str, kind: str) -> Any:
    chunks = list(_ask(engine, kind, stream=True, stream_options={"include_usage": True}))
    told = [getattr(choice, "logprobs", None) for chunk in chunks for choice in chunk.choices]
    return _scored(litellm.stream_chunk_builder(chunks), [entry for one in told for entry in (one or NOTHING).content])


def _scored(answer: Any, logprobs: list[Any]) -> Any:
    return told(answer), [(one.token, round(one.logprob, 3), [top.token for top in one.top_logprobs]) for one in logprobs]


def _text(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def _vectors(engine: str) -> list[list[float]]:
    return [entry["embedding"] for entry in litellm.embedding(model=f"minivllm/{engine}", input=TEXTS).data]


@pytest.fixture(scope="module")
def expected(registry: Registry) -> dict[str, Any]:
    """Without guesses: what is said to each kind of request, to the neighbour, and of the texts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(litellm, "custom_provider_map", [_entry(registry)])
        answers = {kind: _whole("plain", kind) for kind in KINDS}
        return {**answers, "neighbour": _ask("plain", "plain", **LONG).choices[0].message.content, "texts": _vectors("plain")}


@pytest.mark.parametrize("kind", KINDS)
def test_alone(kind: str, registry: Registry, expected: dict[str, Any]) -> None:
    for ask in (_whole, _streamed):
        before = registry.accepted()
        assert ask("guessing", kind) == expected[kind]
        assert (registry.accepted() > before) == (kind in GUESSED)


@pytest.mark.parametrize("kind", KINDS)
def test_beside_one_whose_guesses_come_true(kind: str, registry: Registry, expected: dict[str, Any]) -> None:
    """The neighbour is there first, and some texts are embedded meanwhile."""
    registry.company.steps.clear()
    with ThreadPoolExecutor(2) as pool:
        neighbour = iter(_ask("guessing", "plain", stream=True, **LONG))
        first = next(neighbour)
        asked, vectors = pool.submit(_streamed, "guessing", kind), pool.submit(_vectors, "guessing")
        assert _text([first, *neighbour]) == expected["neighbour"]
        assert asked.result() == expected[kind]
        assert vectors.result() == expected["texts"]
    assert any(len(gained) > 1 and max(gained.values()) > 1 for gained in registry.company.steps)
