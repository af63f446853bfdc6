"""Every parameter is honoured, neutral, ignored for a stated reason, or refused by name. (Kind: the parameter half of G08.)"""

import dataclasses
import math
from typing import Any

import litellm
import pytest

from minivllm_adapters import parameters_table as table
from minivllm_adapters.handler import MinivllmProvider
from minivllm_adapters.params import CallPlan, plan_call
from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.sampling_parameters import SamplingParams

MODEL = "minivllm/fake"
MESSAGES = [{"role": "user", "content": "hello"}]
DEFAULTS = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=None)


def _plan(*, messages: Any = MESSAGES, text: bool = False, stream: bool = False, drop: bool = False, **params: Any) -> CallPlan:
    return plan_call(messages, params, text_completion=text, stream=stream, drop_unsupported=drop)


def _ask(**kwargs: Any) -> Any:
    return litellm.completion(model=MODEL, messages=kwargs.pop("messages", MESSAGES), **kwargs)


HONOURED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0}, {"temperature": 0}),
    ({"temperature": 0.2}, {"temperature": 0.2}),
    ({"top_p": 0.5}, {"top_p": 0.5}),
    ({"top_k": 5}, {"top_k": 5}),
    ({"min_p": 0.1}, {"min_p": 0.1}),
    ({"seed": 42}, {"seed": 42}),
    ({"max_tokens": 3}, {"max_tokens": 3}),
    ({"max_completion_tokens": 4}, {"max_tokens": 4}),
    ({"max_completion_tokens": 4, "max_tokens": 3}, {"max_tokens": 4}),
    ({"min_tokens": 2}, {"min_tokens": 2}),
    ({"stop": "is"}, {"stop": ("is",)}),
    ({"stop": ["is", "of"]}, {"stop": ("is", "of")}),
    ({"stop_token_ids": [7, 8]}, {"stop_token_ids": (7, 8)}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
    ({"skip_special_tokens": False}, {"skip_special_tokens": False}),
    ({"extra_args": {"ban": [3]}}, {"extra_args": {"ban": [3]}}),
    ({"vllm_xargs": {"ban": [3]}}, {"extra_args": {"ban": [3]}}),
    ({"presence_penalty": 0.5}, {"presence_penalty": 0.5}),
    ({"frequency_penalty": -1}, {"frequency_penalty": -1}),
    ({"repetition_penalty": 1.1}, {"repetition_penalty": 1.1}),
    ({"logit_bias": {"5": 10}}, {"logit_bias": {5: 10}}),
    ({"bad_words": ["no"]}, {"bad_words": ("no",)}),
    ({"allowed_token_ids": [4, 5]}, {"allowed_token_ids": (4, 5)}),
    ({"prompt_logprobs": 2}, {"prompt_logprobs": 2}),
    ({"n": 3}, {"n": 3}),
    ({"thinking_token_budget": 64}, {"thinking_token_budget": 64}),
    ({"extra_body": {"top_k": 5, "min_p": 0.2}}, {"top_k": 5, "min_p": 0.2}),
    ({"extra_body": {"top_k": 5}, "top_k": 3}, {"top_k": 5}),
    ({"extra_body": {"max_completion_tokens": 9}}, {"max_tokens": 9}),
]


@pytest.mark.parametrize(("given", "expected"), HONOURED, ids=str)
def test_sampling_parameters_arrive_at_the_engine(provider: MinivllmProvider, llm: Any, given: Any, expected: Any) -> None:
    _ask(**given)
    assert llm.submissions[-1].params == llm.default_sampling_params().replace(**expected)


def test_every_sampling_field_is_reachable() -> None:
    """Except what the engine sets itself."""
    own_names = {"structured_outputs", "logprobs"}  # stand in the table under the parameters that set them
    fields = {f.name for f in dataclasses.fields(SamplingParams) if f.init} - {"max_model_length", "bad_words_token_ids"}
    assert fields == table.SAMPLING | own_names
    assert own_names < table.SUPPORTED
    assert {name for given, _ in HONOURED for name in given if name != "extra_body"} == table.SAMPLING | table.ALIASES.keys()


def test_the_table_gives_each_name_one_meaning() -> None:
    groups = [table.SUPPORTED, frozenset(table.IGNORED), frozenset(table.NEUTRAL_ONLY)]
    assert len(set().union(*groups)) == sum(len(group) for group in groups)
    assert all(table.IGNORED.values())
    assert frozenset(table.NEUTRAL_ONLY) > table.OPENAI


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({"priority": 3}, {"priority": 3}),
        ({"cache_salt": "tenant"}, {"cache_salt": "tenant"}),
        ({"request_id": "mine"}, {"request_id": "mine"}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"continue_final_message": True, "add_generation_prompt": False}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"extra_body": {"chat_template_kwargs": {"a": 1}}}, {"chat_template_kwargs": {"a": 1}}),
        ({"request_metadata": {"tenant": "acme"}}, {"metadata": {"tenant": "acme"}}),
    ],
    ids=str,
)
def test_queue_and_template_options_arrive_at_the_engine(provider: MinivllmProvider, llm: Any, given: Any, options: Any) -> None:
    _ask(**given)
    sent = llm.submissions[-1].options
    assert {name: sent[name] for name in options} == options
    assert set(sent) == {"request_id", "timeout", "priority", "cache_salt", "metadata", "tools"} | options.keys()


@pytest.mark.parametrize(
    "given",
    [
        {"presence_penalty": 0},
        {"frequency_penalty": 0.0},
        {"logit_bias": {}},
        {"n": 1},
        {"logprobs": False},
        {"response_format": {"type": "text"}},
        {"tools": []},
        {"tool_choice": "none"},
        {"parallel_tool_calls": True},
        {"service_tier": "auto"},
        {"store": False},
        {"modalities": ["text"]},
        {"metadata": {"trace": "1"}},
        {"user": "somebody"},
        {"prompt_cache_key": "k"},
        {"safety_identifier": "s"},
        {"max_retries": 3},
        {"stream_options": {"include_usage": True}, "stream": True},
        {"repetition_penalty": 1.0},
        {"best_of": 1},
        {"extra_headers": {"x-trace": "1"}},
        {"seed": None, "stop": None, "top_k": None},
    ],
    ids=str,
)
def test_values_that_change_nothing_are_accepted(provider: MinivllmProvider, llm: Any, given: Any) -> None:
    answer = _ask(**given)
    _ = list(answer) if given.get("stream") else answer
    assert llm.submissions[-1].params == llm.default_sampling_params()


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
REFUSED: list[dict[str, Any]] = [
    {"functions": [TOOL["function"]]},
    {"function_call": {"name": "f"}},
    {"service_tier": "flex"},
    {"store": True},
    {"modalities": ["text", "audio"]},
    {"audio": {"voice": "alloy", "format": "wav"}},
    {"prediction": {"type": "content", "content": "x"}},
    {"web_search_options": {}},
    {"best_of": 2},
    {"echo": True},
    {"prompt_logprobs": 1, "stream": True},
    {"best_of": 2, "stream": True},
    {"response_format": {"type": "xml"}},
    {"tools": [{"type": "web_search"}]},
    {"prompt_token_ids": [1, 2]},
    {"temprature": 0.5},
    {"enable_thinking": False},
    {"use_beam_search": True},
    {"detokenize": False},
    {"extra_body": {"beam_width": 4}},
]


@pytest.mark.parametrize("given", REFUSED, ids=str)
def test_what_cannot_be_honoured_is_refused_by_name(provider: MinivllmProvider, llm: Any, registry: Any, given: Any) -> None:
    with pytest.raises(litellm.UnsupportedParamsError) as caught:
        _ask(**given)
    names = [*given, *given.get("extra_body", {})]
    assert any(name in str(caught.value) for name in names)
    assert not registry.load_threads  # told before a model is loaded for it


@pytest.mark.parametrize("given", [{"functions": [{}]}, {"temprature": 1}, {"enable_thinking": True}], ids=str)
def test_a_refusal_says_what_to_do(given: Any) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"supported are .*temperature|pass tools|chat_template_kwargs"):
        _plan(**given)


def test_stream_options_other_than_usage_are_refused() -> None:
    _plan(stream_options={"include_usage": False, "include_obfuscation": False})
    with pytest.raises(UnsupportedFeatureError, match="continuous_usage_stats"):
        _plan(stream_options={"continuous_usage_stats": True})
    with pytest.raises(UnsupportedFeatureError, match="stream_options"):
        _plan(stream_options=[1])


@pytest.mark.parametrize("switch", ["call", "global"])
def test_drop_params_drops_what_openai_has_and_we_do_not(
    provider: MinivllmProvider, llm: Any, monkeypatch: pytest.MonkeyPatch, switch: str
) -> None:
    kwargs: dict[str, Any] = {"drop_params": True} if switch == "call" else {}
    if switch == "global":
        monkeypatch.setattr(litellm, "drop_params", True)
    _ask(service_tier="flex", store=True, modalities=["audio"], functions=[TOOL["function"]], top_k=3, **kwargs)
    assert llm.submissions[-1].params == llm.default_sampling_params().replace(top_k=3)
    with pytest.raises(litellm.UnsupportedParamsError, match="temprature"):
        _ask(temprature=1, **kwargs)
    with pytest.raises(litellm.BadRequestError, match="top_k"):
        _ask(top_k=-5, **kwargs)


@pytest.mark.parametrize("n", [0, -1, 129, True, "2", 1.0])
def test_no_such_number_of_choices(n: Any) -> None:
    with pytest.raises(InvalidRequestError, match="n"):
        _plan(n=n)


def test_tools_that_litellm_would_have_dropped_or_refused() -> None:
    with pytest.raises(InvalidRequestError, match="tools must be a list"):
        _plan(tools={"name": "f"})
    with pytest.raises(UnsupportedFeatureError, match="allowed_tools"):
        _plan(tools=[TOOL], tool_choice={"type": "allowed_tools"})


MALFORMED: list[dict[str, Any]] = [
    {"tool_choice": "required"},
    {"tool_choice": "required", "tools": []},
    {"tool_choice": "sometimes", "tools": [TOOL]},
    {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
    {"tools": [{"type": "function"}]},
    {"tools": [TOOL, TOOL]},
    {"parallel_tool_calls": "yes", "tools": [TOOL]},
    {"response_format": {"type": "json_schema"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "{"}}},
    {"response_format": {"type": "json_object"}, "guided_regex": "a+"},
    {"response_format": SCHEMA, "tools": [TOOL], "tool_choice": "required"},
    {"guided_json": "{"},
    {"guided_regex": ""},
    {"guided_choice": []},
    {"guided_choice": ["yes", 3]},
    {"guided_grammar": 3},
    {"structured_outputs": {"regex": "a", "choice": ["b"]}},
    {"structured_outputs": {"xml": "a"}},
    {"structured_outputs": "a+"},
    {"top_logprobs": 3},
    {"logprobs": True, "top_logprobs": 21},
    {"logprobs": True, "top_logprobs": -1},
    {"logprobs": 5},
    {"request_metadata": "acme"},
    {"logit_bias": {"five": 1}},
    {"logit_bias": [5]},
    {"max_tokens": 2, "min_tokens": 3},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("given", MALFORMED, ids=str)
def test_what_is_malformed_is_a_bad_request_before_a_model_is_loaded(
    provider: MinivllmProvider, llm: Any, registry: Any, given: Any, stream: bool
) -> None:
    with pytest.raises(litellm.BadRequestError) as caught:
        _ask(**given, stream=stream)
    assert caught.value.status_code == 400
    assert any(name in str(caught.value) for name in given)
    assert not registry.load_threads


@pytest.mark.parametrize("name", sorted(table.SAMPLING - {"stop", "stop_token_ids"}))
@pytest.mark.parametrize("value", ["x", [None], {}, math.nan, -7], ids=str)
def test_values_of_the_wrong_kind_are_named(name: str, value: Any) -> None:
    if value == {} and name in ("extra_args", "logit_bias", "bad_words"):
        pytest.skip("nothing of its kind")
    with pytest.raises(InvalidRequestError, match=name):
        _plan(**{name: value})
