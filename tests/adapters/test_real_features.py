"""Features of a LiteLLM call on the real SmolLM2-135M: forms, tools, log-probabilities, several choices."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import litellm
import pytest
from pydantic import BaseModel

import minivllm_plugin
from minivllm_plugin import LLM, SamplingParams, registry

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = "minivllm/smollm2-135m"
MESSAGES = [{"role": "user", "content": "What is the weather in Paris?"}]
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"enum": ["c", "f"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "Weather of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now", "description": "Time", "parameters": {"type": "object", "properties": {}}}},
]
SAMPLED = pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 11}], ids=["greedy", "sampled"])


class Unit(BaseModel):
    name: str


class Trip(BaseModel):
    """Nested: its schema has definitions and references."""

    start: Unit
    stops: int


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    yield minivllm_plugin.get_llm("smollm2-135m")
    registry.close("smollm2-135m")


@pytest.fixture(autouse=True)
def _registered(llm: LLM) -> None:
    minivllm_plugin.register()


def _ask(**kwargs: Any) -> Any:
    return litellm.completion(**{"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 8, **kwargs})


def _rebuilt(**kwargs: Any) -> Any:
    return litellm.stream_chunk_builder(list(_ask(stream=True, **kwargs)))


@SAMPLED
def test_a_pydantic_class_parses(sampling: Any) -> None:
    params: dict[str, Any] = {**sampling, "response_format": Trip, "max_tokens": 200}
    answer = _ask(**params)
    assert answer.choices[0].finish_reason == "stop"
    Trip.model_validate_json(answer.choices[0].message.content)
    assert _rebuilt(**params).choices[0].message.content == answer.choices[0].message.content


@SAMPLED
def test_forms(sampling: Any) -> None:
    answer = _ask(response_format={"type": "json_object"}, max_tokens=200, **sampling).choices[0]
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.message.content), dict)
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER}}
    answer = _ask(response_format=schema, max_tokens=200, **sampling).choices[0]
    assert answer.finish_reason == "stop"
    jsonschema.validate(json.loads(answer.message.content), WEATHER)
    assert _ask(guided_choice=["sunny", "rainy"], **sampling).choices[0].message.content in ("sunny", "rainy")
    number = _ask(guided_regex="-?[0-9]{1,2}", **sampling).choices[0]
    assert (int(number.message.content) is not None, number.finish_reason) == (True, "stop")


@SAMPLED
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}], ids=["required", "named"])
def test_forced_calls(sampling: Any, choice: Any) -> None:
    params: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 400, **sampling}
    whole, streamed = _ask(**params).choices[0], _rebuilt(**params).choices[0]
    assert whole.finish_reason == streamed.finish_reason == "tool_calls"
    calls = [[(c.function.name, c.function.arguments) for c in one.message.tool_calls] for one in (whole, streamed)]
    assert calls[0] == calls[1]
    for name, arguments in calls[0]:
        jsonschema.validate(json.loads(arguments), WEATHER if name == "weather" else {"type": "object"})
    if choice != "required":
        assert [name for name, _ in calls[0]] == ["weather"]
    cut = _ask(**{**params, "max_tokens": 12}).choices[0]
    assert cut.finish_reason == "length"


def test_a_conversation_with_a_tool(llm: LLM) -> None:
    call = _ask(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "weather"}}, max_tokens=100).choices[0].message
    result = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "18 degrees, sunny"}
    answer = _ask(messages=[*MESSAGES, call, result], tools=TOOLS)
    assert answer.choices[0].message.content
    plain = _ask(tools=TOOLS, tool_choice="none").choices[0].message
    assert plain.content == _ask().choices[0].message.content
    assert plain.tool_calls is None


def test_log_probabilities(llm: LLM) -> None:
    answer = _ask(logprobs=True, top_logprobs=5)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content
    for entry in content:
        assert entry.logprob == entry.top_logprobs[0].logprob  # greedy
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1 + 1e-6
    chunks = list(_ask(logprobs=True, top_logprobs=5, stream=True))
    streamed = [entry for c in chunks if getattr(c.choices[0], "logprobs", None) for entry in c.choices[0].logprobs.content]
    assert [(e.token, e.bytes) for e in streamed] == [(e.token, e.bytes) for e in content]
    assert [e.logprob for e in streamed] == pytest.approx([e.logprob for e in content], abs=1e-4)


def test_prompt_log_probabilities_are_the_same_with_a_warm_cache(llm: LLM) -> None:
    _ask(cache_salt="logprobs")
    first = _ask(prompt_logprobs=2, max_tokens=1)
    again = _ask(prompt_logprobs=2, max_tokens=1)
    assert len(first.prompt_logprobs) == first.usage.prompt_tokens
    assert first.prompt_logprobs[0] is None
    values = [[[(t, e["rank"]) for t, e in entry.items()] for entry in a.prompt_logprobs[1:]] for a in (first, again)]
    assert values[0] == values[1]


def test_choices_share_the_prompt_and_have_their_own_ends(llm: LLM) -> None:
    params: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 5, "max_tokens": 6, "stop": ["e"]}
    whole, streamed = _ask(**params), _rebuilt(**params, stream_options={"include_usage": True})
    for one in (whole, streamed):
        assert [c.index for c in one.choices] == [0, 1, 2]
    assert [(c.message.content or "", c.finish_reason) for c in streamed.choices] == [
        (c.message.content, c.finish_reason) for c in whole.choices
    ]
    assert streamed.usage.completion_tokens == whole.usage.completion_tokens
    assert whole.usage.prompt_tokens == _ask().usage.prompt_tokens


def test_echo_and_the_best_of_several(llm: LLM) -> None:
    prompt = "The capital of France is"
    drawn: dict[str, Any] = {"temperature": 1.0, "seed": 2, "max_tokens": 5}
    outputs = llm.generate(prompt, SamplingParams(n=4, logprobs=0, **drawn), use_tqdm=False)[0].outputs
    best = max(outputs, key=lambda one: (one.cumulative_logprob or 0.0) / len(one.token_ids))
    answer: Any = litellm.text_completion(model=MODEL, prompt=prompt, best_of=4, echo=True, **drawn)
    assert [choice.text for choice in answer.choices] == [prompt + best.text]


def test_biases_and_penalties_show(llm: LLM) -> None:
    assert llm.tokenizer is not None
    [word] = llm.tokenizer.encode(" Paris")
    assert _ask(logit_bias={str(word): 100}, max_tokens=3).choices[0].message.content == " Paris Paris Paris"
    usual = _ask(max_tokens=12).choices[0].message.content
    banned = usual.split()[1]
    assert banned not in _ask(max_tokens=12, bad_words=[banned]).choices[0].message.content.split()
    assert _ask(max_tokens=12, allowed_token_ids=[word]).choices[0].message.content.split() == ["Paris"] * 12
    again: dict[str, Any] = {"model": MODEL, "prompt": ("one two three, " * 8).strip(), "temperature": 0, "max_tokens": 8}
    assert "one three, one" in litellm.text_completion(**again).choices[0].text
    assert "one three, one" not in litellm.text_completion(**again, repetition_penalty=5.0).choices[0].text
