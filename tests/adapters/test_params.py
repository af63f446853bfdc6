"""Every parameter is honoured, neutral, ignored for a stated reason, or refused by name. (Kind: the parameter half of G08.)"""

import math
from typing import Any

import httpx
import litellm
import pytest

from minivllm_adapters import parameters_table as table
from minivllm_adapters.deadlines import DEFAULT_TIMEOUT, Deadline
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
    ({"extra_body": {"top_k": 5, "min_p": 0.2}}, {"top_k": 5, "min_p": 0.2}),
    ({"extra_body": {"top_k": 5}, "top_k": 3}, {"top_k": 5}),
    ({"extra_body": {"max_completion_tokens": 9}}, {"max_tokens": 9}),
]


@pytest.mark.parametrize(("given", "expected"), HONOURED, ids=str)
def test_sampling_parameters_arrive_at_the_engine(provider: MinivllmProvider, llm: Any, given: Any, expected: Any) -> None:
    _ask(**given)
    assert llm.submissions[-1].params == llm.default_sampling_params().replace(**expected)


def test_every_sampling_field_is_reachable() -> None:
    """Except the bound that the engine sets itself."""
    fields = set(SamplingParams.__dataclass_fields__) - {"max_model_length"}
    assert fields == table.SAMPLING
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
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": {"enable_thinking": False}}),
        ({"extra_body": {"chat_template_kwargs": {"a": 1}}}, {"chat_template_kwargs": {"a": 1}}),
    ],
    ids=str,
)
def test_queue_and_template_options_arrive_at_the_engine(provider: MinivllmProvider, llm: Any, given: Any, options: Any) -> None:
    _ask(**given)
    sent = llm.submissions[-1].options
    assert {name: sent[name] for name in options} == options
    assert set(sent) == {"request_id", "timeout", "priority", "cache_salt"} | options.keys()


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
REFUSED: list[dict[str, Any]] = [
    {"presence_penalty": 0.5},
    {"frequency_penalty": -1},
    {"logit_bias": {"5": 10}},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2},
    {"response_format": {"type": "json_object"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tool_choice": "required"},
    {"functions": [TOOL["function"]]},
    {"service_tier": "flex"},
    {"store": True},
    {"modalities": ["text", "audio"]},
    {"audio": {"voice": "alloy", "format": "wav"}},
    {"prediction": {"type": "content", "content": "x"}},
    {"web_search_options": {}},
    {"repetition_penalty": 1.1},
    {"best_of": 2},
    {"echo": True},
    {"guided_json": {"type": "object"}},
    {"structured_outputs": {"regex": "a+"}},
    {"prompt_logprobs": 1},
    {"bad_words": ["no"]},
    {"prompt_token_ids": [1, 2]},
    {"temprature": 0.5},
    {"enable_thinking": False},
    {"extra_body": {"beam_width": 4}},
]


@pytest.mark.parametrize("given", REFUSED, ids=str)
def test_what_cannot_be_honoured_is_refused_by_name(provider: MinivllmProvider, llm: Any, registry: Any, given: Any) -> None:
    with pytest.raises(litellm.UnsupportedParamsError) as caught:
        _ask(**given)
    names = [*given, *given.get("extra_body", {})]
    assert any(name in str(caught.value) for name in names)
    assert not registry.load_threads  # told before a model is loaded for it


@pytest.mark.parametrize("given", [{"tools": [TOOL]}, {"temprature": 1}, {"enable_thinking": True}], ids=str)
def test_a_refusal_says_what_to_do(given: Any) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"supported are .*temperature|describe|chat_template_kwargs"):
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
    _ask(presence_penalty=0.5, tools=[TOOL], logprobs=True, response_format={"type": "json_object"}, top_k=3, **kwargs)
    assert llm.submissions[-1].params.top_k == 3
    list(_ask(n=2, stream=True, **kwargs))
    assert len(llm.submissions) == 2
    with pytest.raises(litellm.UnsupportedParamsError, match="temprature"):
        _ask(temprature=1, **kwargs)
    with pytest.raises(litellm.BadRequestError, match="top_k"):
        _ask(top_k=-5, **kwargs)


def test_several_choices_cannot_be_streamed(provider: MinivllmProvider, llm: Any) -> None:
    with pytest.raises(litellm.UnsupportedParamsError, match="n=2"):
        _ask(n=2, stream=True)
    for n in (0, -1, 129, True, "2", 1.0):
        with pytest.raises(InvalidRequestError, match="n"):
            _plan(n=n)
    assert not llm.submissions


@pytest.mark.parametrize("name", sorted(table.SAMPLING - {"stop", "stop_token_ids"}))
@pytest.mark.parametrize("value", ["x", [None], {}, math.nan, -7], ids=str)
def test_values_of_the_wrong_kind_are_named(name: str, value: Any) -> None:
    if (name, value) == ("extra_args", {}):
        pytest.skip("this is its kind")
    with pytest.raises(InvalidRequestError, match=name):
        _plan(**{name: value})


# --- messages -----------------------------------------------------------------------------------------------------------------


def test_messages_are_put_right_where_litellm_leaves_that_to_us(provider: MinivllmProvider, llm: Any) -> None:
    answer = _ask().choices[0].message
    _ask(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            answer,
            {"role": "assistant", "content": None},
            {"role": "user", "content": "go on"},
        ]
    )
    sent = llm.submissions[-1].prompt
    assert [(m["role"], m["content"]) for m in sent] == [
        ("system", "Be brief."),
        ("user", [{"type": "text", "text": "hello"}]),
        ("assistant", answer.content),
        ("assistant", ""),
        ("user", "go on"),
    ]


@pytest.mark.parametrize("messages", [[], None, ["hello"], [{"content": "no role"}], [{"role": 3, "content": "x"}]], ids=str)
def test_messages_that_are_none(messages: Any) -> None:
    with pytest.raises(InvalidRequestError, match="message"):
        _plan(messages=messages)


# --- text completions ---------------------------------------------------------------------------------------------------------


def test_raw_prompts_and_token_ids() -> None:
    one = _plan(text=True, messages=[{"role": "user", "content": "Once upon"}])
    assert (one.messages, one.prompts, one.num_requests) == (None, ("Once upon",), 1)
    two = _plan(text=True, messages=[{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], n=2)
    assert (two.prompts, two.num_requests) == (("a", "b"), 4)
    seeded = _plan(seed=2**64 - 1, n=2)
    assert [seeded.sampling_params(DEFAULTS, choice).seed for choice in (0, 1)] == [2**64 - 1, 0]
    assert one.sampling_params(DEFAULTS).max_tokens == 16  # the completions API's default
    assert _plan().sampling_params(DEFAULTS).max_tokens is None
    empty = [{"role": "user", "content": ""}]
    assert _plan(text=True, messages=empty, prompt_token_ids=[1, 2]).prompts == ([1, 2],)
    assert _plan(text=True, messages=empty, prompt_token_ids=[[1, 2], [3]]).prompts == ([1, 2], [3])


@pytest.mark.parametrize(
    "given",
    [
        {"prompt_token_ids": []},
        {"prompt_token_ids": "1 2"},
        {"prompt_token_ids": [1], "messages": [{"role": "user", "content": "and a text"}]},
        {"messages": [{"role": "user", "content": [1, 2]}]},
        {"messages": []},
        {"add_generation_prompt": False},
        {"stream": True, "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
    ],
    ids=str,
)
def test_text_completions_that_make_no_sense(given: Any) -> None:
    given = {"messages": [{"role": "user", "content": ""}], **given}
    with pytest.raises(InvalidRequestError):
        _plan(text=True, **given)


# --- timeouts -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, DEFAULT_TIMEOUT),
        (3, 3.0),
        (0.5, 0.5),
        ("2.5", 2.5),
        (httpx.Timeout(7), 7.0),
        (httpx.Timeout(7, read=None, pool=9), 9.0),
        (httpx.Timeout(None), math.inf),
        (math.inf, math.inf),
        (1e30, math.inf),
    ],
    ids=str,
)
def test_timeouts_of_all_kinds(given: Any, seconds: float) -> None:
    deadline = Deadline.after(given)
    assert deadline.timeout == seconds
    left = deadline.remaining()
    assert (left is None) if math.isinf(seconds) else (left is not None and 0 < left <= seconds)


@pytest.mark.parametrize("given", [0, -1, math.nan, "soon", [], True, httpx.Timeout(0)], ids=str)
def test_timeouts_that_are_none(given: Any) -> None:
    with pytest.raises(InvalidRequestError, match="timeout"):
        Deadline.after(given)
