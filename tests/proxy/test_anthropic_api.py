"""Anthropic's own client in front of the real proxy, which translates."""

from typing import Any

ANSWER = "The capital of France is Paris 🌶."
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER_TOKENS = len(ANSWER.encode()) + 1
TOOLS: list[Any] = [
    {
        "name": "get_weather",
        "description": "The weather in a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


def test_a_message(anthropic_client: Any) -> None:
    made = anthropic_client.messages.create(model="scripted", max_tokens=100, messages=QUESTION, system="Be brief.")
    assert [(block.type, block.text) for block in made.content] == [("text", ANSWER)]
    assert (made.role, made.stop_reason, made.usage.output_tokens) == ("assistant", "end_turn", ANSWER_TOKENS)
    short = anthropic_client.messages.create(model="scripted", max_tokens=3, messages=QUESTION)
    assert (short.content[0].text, short.stop_reason) == ("The", "max_tokens")


def test_a_stream(anthropic_client: Any) -> None:
    with anthropic_client.messages.stream(model="scripted", max_tokens=100, messages=QUESTION) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text == ANSWER
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", ANSWER_TOKENS)


def test_tools_and_their_results(anthropic_client: Any) -> None:
    asked: list[Any] = [{"role": "user", "content": "Call a tool"}]
    made = anthropic_client.messages.create(model="scripted", max_tokens=200, messages=asked, tools=TOOLS)
    (call,) = [block for block in made.content if block.type == "tool_use"]
    assert (made.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history: list[Any] = [
        *asked,
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in made.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "And the capital of France?"}]},
    ]
    last = anthropic_client.messages.create(model="scripted", max_tokens=200, messages=history, tools=TOOLS)
    assert (last.content[0].text, last.stop_reason) == (ANSWER, "end_turn")


def test_reasoning_comes_as_thinking(lax_anthropic_client: Any) -> None:
    asked: list[Any] = [{"role": "user", "content": "Think first"}]
    made = lax_anthropic_client.messages.create(model="scripted", max_tokens=200, messages=asked)
    assert [block.type for block in made.content] == ["thinking", "text"]
    assert (made.content[0].thinking, made.content[1].text) == ("France, so", "Paris")


def test_tokens_are_counted_without_generating(anthropic_client: Any) -> None:
    assert anthropic_client.messages.count_tokens(model="scripted", messages=QUESTION).input_tokens > 0
