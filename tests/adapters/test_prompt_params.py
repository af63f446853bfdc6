"""Messages, template options and raw prompts: what LiteLLM leaves to the provider, and what makes no sense."""

from typing import Any

import litellm
import pytest

from minivllm_adapters.handler import MinivllmProvider
from minivllm_adapters.params import CallPlan, plan_call
from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.sampling_parameters import SamplingParams

MODEL = "minivllm/fake"
MESSAGES = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
DEFAULTS = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=None)


def _plan(*, messages: Any = MESSAGES, text: bool = False, stream: bool = False, **params: Any) -> CallPlan:
    return plan_call(messages, params, text_completion=text, stream=stream, drop_unsupported=False)


def _ask(**kwargs: Any) -> Any:
    return litellm.completion(model=MODEL, messages=kwargs.pop("messages", MESSAGES), **kwargs)


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
    assert (two.prompts, two.num_requests, two.sampling_params(DEFAULTS).n) == (("a", "b"), 2, 2)
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


@pytest.mark.parametrize(
    "given",
    [{"tools": [TOOL]}, {"reasoning_effort": "low"}, {"chat_template_kwargs": {}}, {"logprobs": 3}, {"prompt_logprobs": 1}],
    ids=str,
)
def test_what_only_chats_have_is_refused_by_name(given: Any) -> None:
    with pytest.raises(UnsupportedFeatureError, match=next(iter(given))):
        _plan(text=True, **given)


def test_neutral_values_of_a_chat_are_no_error_in_a_text_completion() -> None:
    _plan(text=True, tools=[], tool_choice="none", logprobs=False)


# --- the chat template --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "switch"),
    [
        ({"reasoning_effort": "high"}, True),
        ({"reasoning_effort": "minimal"}, True),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": {"effort": "none", "summary": "auto"}}, False),
        ({"thinking": {"type": "enabled"}}, True),
        ({"thinking": {"type": "adaptive"}}, True),
        ({"thinking": {"type": "disabled"}}, False),
        ({"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, False),
    ],
    ids=str,
)
def test_reasoning_is_switched_through_the_template(given: Any, switch: bool) -> None:
    assert _plan(**given).template["chat_template_kwargs"] == {"enable_thinking": switch}


@pytest.mark.parametrize("given", [{"reasoning_effort": "a lot"}, {"reasoning_effort": 3}, {"thinking": True}, {"thinking": {}}])
def test_no_such_reasoning(given: Any) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(given))):
        _plan(**given)


def test_a_thinking_budget() -> None:
    enabled = _plan(thinking={"type": "enabled", "budget_tokens": 64})
    assert enabled.sampling_params(DEFAULTS).thinking_token_budget == 64
    assert enabled.template["chat_template_kwargs"] == {"enable_thinking": True}
    by_name = _plan(thinking={"type": "enabled", "budget_tokens": 64}, thinking_token_budget=8)
    assert by_name.sampling_params(DEFAULTS).thinking_token_budget == 8
    for off in ({"type": "disabled", "budget_tokens": 64}, {"type": "adaptive"}):
        assert _plan(thinking=off).sampling_params(DEFAULTS).thinking_token_budget is None
    with pytest.raises(InvalidRequestError, match="budget_tokens"):
        _plan(thinking={"type": "enabled", "budget_tokens": "many"})


def test_an_answer_that_was_begun_is_gone_on_with() -> None:
    begun = [*MESSAGES, {"role": "assistant", "content": "Hello, I"}]
    continued = {"continue_final_message": True, "add_generation_prompt": False}
    assert _plan(messages=begun, continue_final_message=True).template == continued
    begun[-1]["prefix"] = True  # type: ignore[assignment]  # LiteLLM's mark for other providers
    assert _plan(messages=begun).template == continued
    assert _plan(messages=begun, continue_final_message=False).template == {"continue_final_message": False}
    assert _plan(messages=[*begun, *MESSAGES]).template == {}
