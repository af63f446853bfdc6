"""Each sampling parameter of a LiteLLM call shows in the output: the real sampler and grammars over made-up logits."""

import json
import math
import re
from typing import Any

import jsonschema
import litellm
import pytest
from live_engine import END, Live

from minivllm_plugin import SamplingParams

MODEL = "minivllm/live"
MESSAGES = [{"role": "user", "content": "go"}]
LETTERS = "abcdefghijklmnopqrstuvwxyz "


@pytest.fixture
def model(live: Live) -> Live:
    """Logits of unit variance over bytes; greedy and of eight tokens unless a call says otherwise."""
    live.has_logits = True
    live.options["num_blocks"] = 1024
    live.get_llm("live")
    return live


def _ask(**kwargs: Any) -> Any:
    return litellm.completion(**{"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 8, **kwargs})


def _text(**kwargs: Any) -> str:
    """Of one call; the streamed one must say the same."""
    answer = _ask(**kwargs)
    streamed = "".join(c.choices[0].delta.content or "" for c in _ask(stream=True, **kwargs))
    assert streamed == answer.choices[0].message.content
    return streamed


@pytest.fixture
def letters(model: Live) -> list[int]:
    """What keeps the text readable, and the end out of it."""
    return model.ids(LETTERS)


def _letters(model: Live, **more: float) -> dict[str, float]:
    """A bias that leaves letters only, and some of them more likely."""
    return {str(token): 50.0 for token in model.ids(LETTERS)} | {str(model.ids(one)[0]): 50 + by for one, by in more.items()}


def test_allowed_tokens(model: Live, letters: list[int]) -> None:
    assert set(_text(allowed_token_ids=letters)) <= set(LETTERS)
    assert _text(allowed_token_ids=model.ids("x")) == "x" * 8


def test_logit_bias(model: Live) -> None:
    assert _text(logit_bias={str(model.ids("a")[0]): 100}) == "a" * 8
    usual = _text(logit_bias=_letters(model))
    assert set(usual) <= set(LETTERS)
    assert usual[0] not in _text(logit_bias={**_letters(model), str(model.ids(usual[0])[0]): -100})


def test_bad_words(model: Live, letters: list[int]) -> None:
    usual = _text(allowed_token_ids=letters)
    assert usual[0] not in _text(allowed_token_ids=letters, bad_words=[usual[0]])
    assert usual[:2] not in _text(allowed_token_ids=letters, bad_words=[usual[:2]])
    assert usual[0] in _text(allowed_token_ids=letters, bad_words=[usual[:2]])


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2}, {"presence_penalty": 2}])
def test_penalties_for_what_was_said(model: Live, letters: list[int], penalty: Any) -> None:
    often = _letters(model, a=3.5)
    params: dict[str, Any] = {"logit_bias": often, "max_tokens": 24}
    assert _text(**params, **penalty).count("a") < _text(**params).count("a")
    (name, value) = next(iter(penalty.items()))
    assert _text(**params, **{name: -value}).count("a") > _text(**params, **penalty).count("a")


def test_repetition_penalty(model: Live, letters: list[int]) -> None:
    text = _text(allowed_token_ids=letters, repetition_penalty=1e6, max_tokens=12)
    assert len(set(text)) == len(text)
    assert not set(text) & set("go")  # nor what the prompt has


def test_min_tokens_and_ends(model: Live) -> None:
    end = {"logit_bias": {str(END): 100}}
    answer = _ask(**end, min_tokens=2)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (3, "stop")
    assert _ask(**end).usage.completion_tokens == 1
    ignored = _ask(**end, ignore_eos=True, max_tokens=4)
    assert (ignored.usage.completion_tokens, ignored.choices[0].finish_reason) == (4, "length")
    assert _text(**end, ignore_eos=True, max_tokens=2, skip_special_tokens=False) == "<end><end>"
    assert _text(**end, ignore_eos=True, max_tokens=2) == ""


def test_stops(model: Live, letters: list[int]) -> None:
    usual = _text(allowed_token_ids=letters)
    middle = usual[3]
    cut = usual[: usual.index(middle)]
    assert _text(allowed_token_ids=letters, stop=middle) == cut
    assert _text(allowed_token_ids=letters, stop=["?", middle], include_stop_str_in_output=True) == cut + middle
    assert _text(allowed_token_ids=letters, stop_token_ids=model.ids(middle)) == cut
    assert _ask(allowed_token_ids=letters, stop=middle).choices[0].finish_reason == "stop"


@pytest.mark.parametrize("only", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}], ids=str)
def test_what_leaves_only_the_likeliest(model: Live, letters: list[int], only: Any) -> None:
    assert _text(allowed_token_ids=letters, **{"temperature": 1.5, "seed": 5, **only}) == _text(allowed_token_ids=letters)


def test_a_seed(model: Live, letters: list[int]) -> None:
    drawn: dict[str, Any] = {"temperature": 2.0, "allowed_token_ids": letters, "max_tokens": 12}
    assert _text(**drawn, seed=1) == _text(**drawn, seed=1) != _text(**drawn, seed=2)
    assert len({_ask(**drawn).choices[0].message.content for _ in range(4)}) > 1


def test_several_choices(model: Live, letters: list[int]) -> None:
    drawn: dict[str, Any] = {"temperature": 2.0, "allowed_token_ids": letters, "stop": ["a", "e", "i"], "max_tokens": 6}
    answer = _ask(**drawn, n=4, seed=10)
    single = [_ask(**drawn, seed=10 + index) for index in range(4)]
    assert [c.message.content for c in answer.choices] == [one.choices[0].message.content for one in single]
    assert [c.finish_reason for c in answer.choices] == [one.choices[0].finish_reason for one in single]
    assert answer.usage.prompt_tokens == single[0].usage.prompt_tokens
    assert answer.usage.completion_tokens == sum(one.usage.completion_tokens for one in single)
    rebuilt = litellm.stream_chunk_builder(list(_ask(**drawn, n=4, seed=10, stream=True)))
    assert rebuilt is not None
    assert [(c.message.content or "", c.finish_reason) for c in rebuilt.choices] == [  # type: ignore[union-attr]
        (c.message.content, c.finish_reason) for c in answer.choices
    ]


def test_log_probabilities_are_those_before_any_parameter(model: Live, letters: list[int]) -> None:
    plain = _ask(logprobs=True, top_logprobs=5, max_tokens=1).choices[0].logprobs.content[0]
    changed = _ask(logprobs=True, top_logprobs=5, max_tokens=1, allowed_token_ids=letters, temperature=0.1, top_k=1)
    entry = changed.choices[0].logprobs.content[0]
    assert [top.model_dump() for top in entry.top_logprobs] == [top.model_dump() for top in plain.top_logprobs]
    assert entry.token in LETTERS  # not among the likeliest, and told all the same
    assert entry.logprob < plain.top_logprobs[0].logprob
    values = [top.logprob for top in plain.top_logprobs]
    assert values == sorted(values, reverse=True)
    assert plain.logprob == values[0]
    answer = _ask(logprobs=True, top_logprobs=20)
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    assert all(sum(math.exp(top.logprob) for top in entry.top_logprobs) < 1 for entry in content)
    assert all(len(entry.top_logprobs) == 20 for entry in content)


@pytest.mark.parametrize("stream", [False, True])
def test_bytes_of_half_a_character_are_its_own(model: Live, stream: bool) -> None:
    pepper = model.ids("🌶")
    params: dict[str, Any] = {"guided_regex": "🌶a", "logprobs": True, "top_logprobs": 1, "stream": stream}
    answer = _ask(**params)
    found = (
        [c.choices[0].logprobs for c in answer if getattr(c.choices[0], "logprobs", None)]
        if stream
        else [answer.choices[0].logprobs]
    )
    entries = [entry for logprobs in found for entry in logprobs.content]
    assert [entry.bytes for entry in entries[: len(pepper)]] == [[byte] for byte in "🌶".encode()]
    assert entries[len(pepper)].bytes == list(b"a")


def test_the_best_of_several_has_the_highest_mean(model: Live, letters: list[int]) -> None:
    drawn: dict[str, Any] = {"temperature": 2.0, "allowed_token_ids": letters, "seed": 3, "max_tokens": 5, "stop": ["e"]}
    params = SamplingParams(max_tokens=5).replace(**drawn, n=4, logprobs=0)
    outputs = model.llm.generate("go", params, use_tqdm=False)[0].outputs
    best = max(outputs, key=lambda one: (one.cumulative_logprob or 0.0) / len(one.token_ids))
    answer: Any = litellm.text_completion(model=MODEL, prompt="go", best_of=4, **drawn)
    assert [choice.text for choice in answer.choices] == [best.text]
    assert answer.usage.completion_tokens == sum(len(one.token_ids) for one in outputs)
    echoed: Any = litellm.text_completion(model=MODEL, prompt="go", echo=True, **drawn)
    assert echoed.choices[0].text == "go" + outputs[0].text
    ids: Any = litellm.text_completion(model=MODEL, prompt="", prompt_token_ids=model.ids("go"), echo=True, **drawn)
    assert ids.choices[0].text == echoed.choices[0].text


def test_a_salt_separates_prefixes(model: Live) -> None:
    def cached(**params: Any) -> int:
        return int(_ask(**params).usage.prompt_tokens_details.cached_tokens)

    cached()
    assert cached() > 0
    assert cached(cache_salt="acme") == 0
    assert cached(cache_salt="acme") > 0


# --- forms --------------------------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("feed", "walk")]
SAMPLED = pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7}], ids=["greedy", "sampled"])


@SAMPLED
def test_guided_outputs(model: Live, sampling: Any) -> None:
    assert _text(guided_choice=["yes", "no"], **sampling) in ("yes", "no")
    assert re.fullmatch("[0-9]{3}-[a-f]", _text(guided_regex="[0-9]{3}-[a-f]", **sampling))
    assert _text(guided_grammar='start: "a" b "c"\nb: "x" | "y"', **sampling) in ("axc", "ayc")
    assert _text(structured_outputs={"choice": ["left", "right"]}, max_tokens=9, **sampling) in ("left", "right")
    text: Any = litellm.text_completion(model=MODEL, prompt="go", guided_choice=["yes", "no"], **sampling)
    assert text.choices[0].text in ("yes", "no")


@SAMPLED
@pytest.mark.parametrize("given", ["guided_json", "response_format"])
def test_schemas(model: Live, sampling: Any, given: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}} if given == "response_format" else SCHEMA
    answer = _ask(**{given: form}, max_tokens=300, **sampling)
    assert answer.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(answer.choices[0].message.content), SCHEMA)
    assert _text(**{given: form}, max_tokens=300, **sampling) == answer.choices[0].message.content
    assert _ask(**{given: form}, max_tokens=3, **sampling).choices[0].finish_reason == "length"


@SAMPLED
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "walk"}}], ids=["required", "named"])
def test_forced_calls(model: Live, sampling: Any, choice: Any) -> None:
    params: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "max_tokens": 800, **sampling}
    answer = _ask(**params).choices[0]
    rebuilt: Any = litellm.stream_chunk_builder(list(_ask(stream=True, **params)))
    for one in (answer, rebuilt.choices[0]):
        assert (one.finish_reason, one.message.content) == ("tool_calls", None)
        for call in one.message.tool_calls:
            jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
            assert call.function.name in (("walk",) if choice != "required" else ("feed", "walk"))
        assert choice == "required" or len(one.message.tool_calls) == 1
    calls = [[(c.function.name, c.function.arguments) for c in one.message.tool_calls] for one in (answer, rebuilt.choices[0])]
    assert calls[0] == calls[1]


BAD_FORMS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "foo"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
    {"guided_regex": "("},
    {"guided_regex": "(?=a)b"},
    {"guided_grammar": "start: nothing_there"},
    {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}], "tool_choice": "required"},
    {"logit_bias": {"9999": 1}},
    {"allowed_token_ids": [9999]},
    {"stop_token_ids": [9999]},
    {"extra_args": {"nobody": 1}},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", BAD_FORMS, ids=str)
def test_what_the_engine_cannot_do_is_told_before_anything_is_queued(model: Live, given: Any, stream: bool) -> None:
    with pytest.raises(litellm.BadRequestError):
        _ask(**given, stream=stream)
    snapshot = model.llm.snapshot()
    assert (model.runner.num_calls, snapshot.num_waiting, snapshot.num_running) == (0, 0, 0)
