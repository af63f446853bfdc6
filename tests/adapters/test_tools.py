"""Tools through LiteLLM: what may be called, calls whole and in pieces, history. (Kinds: G02, C12, the tool half of G03.)"""

import asyncio
import json
from typing import Any

import litellm
import pytest
from fake_llm import End

from minivllm_adapters.handler import MinivllmProvider

MODEL = "minivllm/fake"
MESSAGES = [{"role": "user", "content": "What is the weather in Paris and Rome?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "shell", "parameters": {"type": "object", "properties": {}}}},
]
NESTED = '{"n": [{"x": 1}], "s": "mkdir {a,b"}'
TWO_CALLS = (
    "Let me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
    f'<tool_call>\n{{"name": "shell", "arguments": {NESTED}}}\n</tool_call>'
)
EXPECTED = [("weather", '{"city": "Paris"}'), ("shell", NESTED)]


def _ask(**kwargs: Any) -> Any:
    return litellm.completion(**{"model": MODEL, "messages": MESSAGES, "tools": TOOLS, **kwargs})


def _chunks(*, asynchronous: bool, **kwargs: Any) -> list[Any]:
    async def read() -> list[Any]:
        stream: Any = await litellm.acompletion(model=MODEL, messages=MESSAGES, tools=TOOLS, stream=True, **kwargs)
        return [chunk async for chunk in stream]

    return asyncio.run(read()) if asynchronous else list(_ask(stream=True, **kwargs))


def _rebuilt(chunks: list[Any]) -> Any:
    answer = litellm.stream_chunk_builder(chunks)
    assert answer is not None
    return answer.choices[0]


def _calls(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


SIZES = pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 13, 34, 999])
BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def test_a_whole_answer_with_two_calls(provider: MinivllmProvider, llm: Any) -> None:
    llm.steps = [TWO_CALLS]
    answer = _ask()
    message = answer.choices[0].message
    assert (message.content, answer.choices[0].finish_reason) == ("Let me see.", "tool_calls")
    assert _calls(message) == EXPECTED
    assert len({call.id for call in message.tool_calls}) == 2
    assert all(call.id.startswith("call_") and call.type == "function" for call in message.tool_calls)
    assert answer.usage.completion_tokens == 1


@BOTH
@SIZES
def test_streamed_calls_equal_the_whole_ones_however_they_are_cut(
    provider: MinivllmProvider, llm: Any, size: int, asynchronous: bool
) -> None:
    llm.steps = [TWO_CALLS[at : at + size] for at in range(0, len(TWO_CALLS), size)]
    chunks = _chunks(asynchronous=asynchronous, stream_options={"include_usage": True})
    choice = _rebuilt(chunks)
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert _calls(choice.message) == EXPECTED
    for call in choice.message.tool_calls:
        json.loads(call.function.arguments)
    deltas = [call for chunk in chunks for c in chunk.choices for call in c.delta.tool_calls or []]
    assert [(d.index, d.function.name) for d in deltas if d.id] == [(0, "weather"), (1, "shell")]
    assert all(d.function.name is None for d in deltas if not d.id)
    assert [c.finish_reason for chunk in chunks for c in chunk.choices if c.finish_reason] == ["tool_calls"]
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices and chunk.choices[0].delta.role] == ["assistant"]
    assert chunks[-1].usage.completion_tokens == len(llm.steps)


@BOTH
def test_a_call_that_was_cut_is_not_reported_as_complete(provider: MinivllmProvider, llm: Any, asynchronous: bool) -> None:
    llm.steps = ["<tool_call>\n", '{"name": "weather", "arguments": {"ci', End("length")]
    whole = _ask().choices[0]
    assert (whole.finish_reason, _calls(whole.message)) == ("length", [("weather", '{"ci')])
    streamed = _rebuilt(_chunks(asynchronous=asynchronous))
    assert (streamed.finish_reason, _calls(streamed.message)) == ("length", [("weather", '{"ci')])


@pytest.mark.parametrize(
    "text",
    [
        "Use the tag <tool_call> to call a tool.",
        "<tool_call>not JSON</tool_call>",
        "a < b <tool",
        '{"city": "Paris"}',
        "<tool_call>",
    ],
)
def test_text_that_is_no_call_stays_text(provider: MinivllmProvider, llm: Any, text: str) -> None:
    llm.steps = list(text)
    whole = _ask().choices[0]
    assert (whole.message.content, whole.message.tool_calls, whole.finish_reason) == (text, None, "stop")
    chunks = _chunks(asynchronous=False)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_without_tools_nothing_is_taken_for_a_call(provider: MinivllmProvider, llm: Any) -> None:
    llm.steps = [TWO_CALLS]
    for params in ({"tools": None}, {"tools": []}, {"tool_choice": "none"}):
        message = _ask(**params).choices[0].message
        assert (message.content, message.tool_calls) == (TWO_CALLS, None)
        assert llm.submissions[-1].options["tools"] is None
        assert llm.submissions[-1].params.structured_outputs is None


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
@pytest.mark.parametrize(
    ("choice", "parallel", "names", "several"),
    [
        ("required", True, ["weather", "shell"], True),
        ("required", False, ["weather", "shell"], False),
        ("any", True, ["weather", "shell"], True),
        ({"type": "function", "function": {"name": "shell"}}, True, ["shell"], False),
    ],
    ids=str,
)
def test_a_call_that_must_be_made_is_forced_by_a_grammar(
    provider: MinivllmProvider, llm: Any, tool_format: str, choice: Any, parallel: bool, names: list[str], several: bool
) -> None:
    llm.tool_format = tool_format
    text = {
        "hermes": '<tool_call>\n{"name": "shell", "arguments": {}}\n</tool_call>',
        "json": '{"name": "shell", "parameters": {}}',
    }
    llm.steps = [text[tool_format]]
    answer = provider.completion(
        "fake", MESSAGES, optional_params={"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": parallel}
    )
    assert _calls(answer.choices[0].message) == [("shell", "{}")]  # type: ignore[union-attr]
    sent = llm.submissions[-1]
    grammar = sent.params.structured_outputs.grammar
    assert [name for name in ("weather", "shell") if name in grammar] == names
    assert ("{0," in grammar.splitlines()[1]) == several  # the rule ``start``
    assert sent.options["tools"] == TOOLS  # all are described, whichever must be called


def test_a_format_of_a_plugin_cannot_be_forced(provider: MinivllmProvider, llm: Any) -> None:
    llm.tool_format = "none"
    with pytest.raises(litellm.UnsupportedParamsError, match="'none'"):
        _ask(tool_choice="required")
    assert not llm.submissions


@BOTH
def test_only_one_call_when_parallel_ones_are_not_wanted(provider: MinivllmProvider, llm: Any, asynchronous: bool) -> None:
    llm.steps = list(TWO_CALLS)
    whole = _ask(parallel_tool_calls=False).choices[0]
    assert (_calls(whole.message), whole.finish_reason) == (EXPECTED[:1], "tool_calls")
    streamed = _rebuilt(_chunks(asynchronous=asynchronous, parallel_tool_calls=False))
    assert (_calls(streamed.message), streamed.finish_reason) == (EXPECTED[:1], "tool_calls")


def test_tools_and_several_choices(provider: MinivllmProvider, llm: Any) -> None:
    llm.steps = lambda submission: [TWO_CALLS] if submission.choice else ["No ", "call."]
    whole = _ask(n=2)
    assert [(c.finish_reason, _calls(c.message)) for c in whole.choices] == [("stop", []), ("tool_calls", EXPECTED)]
    rebuilt = litellm.stream_chunk_builder(_chunks(asynchronous=False, n=2))
    assert rebuilt is not None
    assert [(c.finish_reason, _calls(c.message)) for c in rebuilt.choices] == [  # type: ignore[union-attr]
        ("stop", []),
        ("tool_calls", EXPECTED),
    ]


# --- other doors --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_responses_carry_calls(provider: MinivllmProvider, llm: Any, stream: bool) -> None:
    llm.steps = list(TWO_CALLS)
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]  # type: ignore[dict-item]
    answer: Any = litellm.responses(model=MODEL, input="weather?", tools=tools, stream=stream)
    output = list(answer)[-1].response.output if stream else answer.output
    calls = [item for item in output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == EXPECTED
    assert [tool["function"]["name"] for tool in llm.submissions[-1].options["tools"]] == ["weather", "shell"]


def test_anthropic_messages_carry_calls(provider: MinivllmProvider, llm: Any) -> None:
    llm.steps = list(TWO_CALLS)
    tools: Any = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]  # type: ignore[index]
    answer: Any = asyncio.run(litellm.anthropic.messages.acreate(model=MODEL, messages=MESSAGES, max_tokens=300, tools=tools))
    blocks = [(block["name"], block["input"]) for block in answer["content"] if block["type"] == "tool_use"]
    assert blocks == [(name, json.loads(arguments)) for name, arguments in EXPECTED]
    assert answer["stop_reason"] == "tool_use"


def test_the_answer_can_be_sent_back_as_history(provider: MinivllmProvider, llm: Any) -> None:
    """LiteLLM's message object, results by id, and a message without content."""
    llm.steps = [TWO_CALLS]
    message = _ask().choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "18 degrees"} for call in message.tool_calls]
    _ask(messages=[*MESSAGES, message, *results])
    sent = llm.submissions[-1].prompt
    assert [m["role"] for m in sent] == ["user", "assistant", "tool", "tool"]
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in sent[1]["tool_calls"]] == EXPECTED
    assert [m["tool_call_id"] for m in sent[2:]] == [call.id for call in message.tool_calls]


@pytest.mark.parametrize(
    ("choice", "names"),
    [({"type": "any"}, ["weather", "shell"]), ({"type": "tool", "name": "shell"}, ["shell"]), ({"type": "auto"}, None)],
    ids=str,
)
def test_the_tool_choice_of_anthropic_messages(provider: MinivllmProvider, llm: Any, choice: Any, names: Any) -> None:
    llm.steps = [TWO_CALLS]
    tools: Any = [{"name": t["function"]["name"], "input_schema": PARAMETERS} for t in TOOLS]  # type: ignore[index]
    call = litellm.anthropic.messages.acreate(model=MODEL, messages=MESSAGES, max_tokens=9, tools=tools, tool_choice=choice)
    asyncio.run(call)
    form = llm.submissions[-1].params.structured_outputs
    assert (form and [name for name in ("weather", "shell") if name in form.grammar]) == names
