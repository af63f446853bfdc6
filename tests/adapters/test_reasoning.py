"""Reasoning apart from the answer, whole and streamed, and the ways to switch it that LiteLLM leaves open."""

import asyncio
from typing import Any

import litellm
import pytest

from minivllm_adapters.handler import MinivllmProvider

MODEL = "minivllm/fake"
MESSAGES = [{"role": "user", "content": "what is 6 times 7"}]
THOUGHT = "<think>\nSix sevens, hm.\n</think>\n\nIt is 42."
CALL = '<think>I should ask.</think>\n<tool_call>\n{"name": "times", "arguments": {"a": 6}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "times", "parameters": {"type": "object", "properties": {}}}}]
BOTH = pytest.mark.parametrize("asynchronous", [False, True])
SIZES = pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 99])


@pytest.fixture(autouse=True)
def _thinks(llm: Any) -> None:
    llm.reasoning_format = "think"


def _ask(**kwargs: Any) -> Any:
    return litellm.completion(model=MODEL, messages=MESSAGES, **kwargs)


def _chunks(*, asynchronous: bool, **kwargs: Any) -> list[Any]:
    async def read() -> list[Any]:
        stream: Any = await litellm.acompletion(model=MODEL, messages=MESSAGES, stream=True, **kwargs)
        return [chunk async for chunk in stream]

    return asyncio.run(read()) if asynchronous else list(_ask(stream=True, **kwargs))


def _reasoning(chunks: list[Any]) -> str:
    return "".join(getattr(c.choices[0].delta, "reasoning_content", None) or "" for c in chunks)


@BOTH
@SIZES
def test_streamed_reasoning_equals_the_whole(provider: MinivllmProvider, llm: Any, size: int, asynchronous: bool) -> None:
    llm.steps = [THOUGHT[at : at + size] for at in range(0, len(THOUGHT), size)]
    message = _ask().choices[0].message
    assert (message.reasoning_content, message.content) == ("Six sevens, hm.", "It is 42.")
    chunks = _chunks(asynchronous=asynchronous)
    assert _reasoning(chunks) == "Six sevens, hm."
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "It is 42."
    assert chunks[0].choices[0].delta.role == "assistant"
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt is not None
    assert rebuilt.choices[0].message.reasoning_content == "Six sevens, hm."  # type: ignore[union-attr]
    assert rebuilt.choices[0].message.content == "It is 42."  # type: ignore[union-attr]


@BOTH
def test_reasoning_then_a_call(provider: MinivllmProvider, llm: Any, asynchronous: bool) -> None:
    llm.steps = list(CALL)
    whole = _ask(tools=TOOLS).choices[0]
    assert (whole.message.reasoning_content, whole.message.content, whole.finish_reason) == ("I should ask.", None, "tool_calls")
    assert whole.message.tool_calls[0].function.arguments == '{"a": 6}'
    rebuilt = litellm.stream_chunk_builder(_chunks(asynchronous=asynchronous, tools=TOOLS))
    assert rebuilt is not None
    streamed: Any = rebuilt.choices[0]
    assert (streamed.message.reasoning_content, streamed.finish_reason) == ("I should ask.", "tool_calls")
    assert [call.function.arguments for call in streamed.message.tool_calls] == ['{"a": 6}']


def test_reasoning_that_the_prompt_opened_and_reasoning_that_was_cut(provider: MinivllmProvider, llm: Any) -> None:
    llm.opens_reasoning = True
    llm.steps = ["Hm", ", six", "</think>", "42"]
    message = _ask().choices[0].message
    assert (message.reasoning_content, message.content) == ("Hm, six", "42")
    cut = _ask(max_tokens=2).choices[0]
    assert (cut.message.reasoning_content, cut.message.content, cut.finish_reason) == ("Hm, six", "", "length")
    assert _reasoning(_chunks(asynchronous=False, max_tokens=2)) == "Hm, six"


def test_a_text_completion_is_not_taken_apart(provider: MinivllmProvider, llm: Any) -> None:
    llm.steps = [THOUGHT]
    assert litellm.text_completion(model=MODEL, prompt="hm").choices[0].text == THOUGHT
    assert "".join(c.choices[0].text or "" for c in litellm.text_completion(model=MODEL, prompt="hm", stream=True)) == THOUGHT


def _switch(llm: Any) -> Any:
    return llm.submissions[-1].options.get("chat_template_kwargs")


def test_the_switch_through_litellm(provider: MinivllmProvider, llm: Any) -> None:
    _ask()
    assert _switch(llm) is None
    _ask(chat_template_kwargs={"enable_thinking": False})
    assert _switch(llm) == {"enable_thinking": False}
    _ask(extra_body={"reasoning_effort": "high"})
    assert _switch(llm) == {"enable_thinking": True}
    _ask(reasoning_effort="none", allowed_openai_params=["reasoning_effort"])
    assert _switch(llm) == {"enable_thinking": False}
    _ask(thinking={"type": "disabled"}, allowed_openai_params=["thinking"])
    assert _switch(llm) == {"enable_thinking": False}
    with pytest.raises(litellm.UnsupportedParamsError, match="reasoning_effort"):  # LiteLLM's own refusal
        _ask(reasoning_effort="high")
    _ask(reasoning_effort="high", drop_params=True)
    assert _switch(llm) is None


def test_the_switch_of_a_router_whose_deployment_declares_it(provider: MinivllmProvider, llm: Any) -> None:
    deployment = {
        "model_name": "thinker",
        "litellm_params": {"model": MODEL},
        "model_info": {"reasoning_effort_levels": ["none", "low", "medium", "high"]},
    }
    router = litellm.Router(model_list=[deployment])
    router.completion(model="thinker", messages=MESSAGES, reasoning_effort="none")  # type: ignore[arg-type]
    assert _switch(llm) == {"enable_thinking": False}
    router.completion(model="thinker", messages=MESSAGES, reasoning_effort="high")  # type: ignore[arg-type]
    assert _switch(llm) == {"enable_thinking": True}


def test_responses_and_anthropic_messages_show_the_reasoning(provider: MinivllmProvider, llm: Any) -> None:
    llm.steps = [THOUGHT]
    answer: Any = litellm.responses(model=MODEL, input="hm")
    kinds = [item.type for item in answer.output]
    assert kinds == ["reasoning", "message"]
    message: Any = asyncio.run(litellm.anthropic.messages.acreate(model=MODEL, messages=MESSAGES, max_tokens=99))
    assert [block["type"] for block in message["content"]] == ["thinking", "text"]
    assert message["content"][0]["thinking"] == "Six sevens, hm."
