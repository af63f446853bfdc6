"""OpenAI's own client, which checks every response against OpenAI's types, in front of the real proxy. (Kind: G10.)"""

import json
from typing import Any

import pytest

ANSWER = "The capital of France is Paris 🌶."
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
PROMPT_TOKENS = len("user: What is the capital of France?\nassistant: ")
ANSWER_TOKENS = len(ANSWER.encode()) + 1  # and the end
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


def test_chat(openai_client: Any) -> None:
    answer = openai_client.chat.completions.create(model="scripted", messages=QUESTION)
    (choice,) = answer.choices
    assert (choice.message.content, choice.message.role, choice.finish_reason) == (ANSWER, "assistant", "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_TOKENS, ANSWER_TOKENS)
    assert answer.usage.total_tokens == PROMPT_TOKENS + ANSWER_TOKENS
    assert answer.id.startswith("chatcmpl-")
    again = openai_client.chat.completions.create(model="scripted", messages=QUESTION)
    assert again.usage.prompt_tokens_details.cached_tokens > 0


@pytest.mark.parametrize("wants_usage", [False, True])
def test_a_stream(openai_client: Any, wants_usage: bool) -> None:
    options: dict[str, Any] = {"stream_options": {"include_usage": True}} if wants_usage else {}
    with openai_client.chat.completions.create(model="scripted", messages=QUESTION, stream=True, **options) as stream:
        chunks = list(stream)
    told = [chunk for chunk in chunks if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in told) == ANSWER
    assert told[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in told if chunk.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    counts = [(chunk.usage.prompt_tokens, chunk.usage.completion_tokens) for chunk in chunks if chunk.usage is not None]
    assert counts == ([(PROMPT_TOKENS, ANSWER_TOKENS)] if wants_usage else [])


def test_parameters_beyond_openai_s_and_limits(openai_client: Any) -> None:
    def ask(**options: Any) -> Any:
        return openai_client.chat.completions.create(model="scripted", messages=QUESTION, **options).choices[0]

    assert ask(max_tokens=3).finish_reason == ask(max_completion_tokens=3).finish_reason == "length"
    assert ask(stop="France").message.content == "The capital of "
    assert ask(extra_body={"stop": "France", "include_stop_str_in_output": True}).message.content == "The capital of France"
    assert ask(extra_body={"top_k": 5, "min_p": 0.1}, temperature=0.5, seed=3).message.content == ANSWER


def test_several_choices(openai_client: Any) -> None:
    answer = openai_client.chat.completions.create(model="scripted", messages=QUESTION, n=3)
    assert [(choice.index, choice.message.content) for choice in answer.choices] == [(index, ANSWER) for index in range(3)]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (PROMPT_TOKENS, 3 * ANSWER_TOKENS)


def test_tools(openai_client: Any) -> None:
    asked: list[Any] = [{"role": "user", "content": "Call two tools"}]
    answer = openai_client.chat.completions.create(model="scripted", messages=asked, tools=TOOLS)
    (choice,) = answer.choices
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert [(call.function.name, json.loads(call.function.arguments)["city"]) for call in calls] == [
        ("get_weather", "Paris"),
        ("get_weather", "Rome"),
    ]
    assert len({call.id for call in calls}) == 2
    history = [
        *asked,
        choice.message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in calls),
        {"role": "user", "content": "And the capital of France?"},
    ]
    last = openai_client.chat.completions.create(model="scripted", messages=history, tools=TOOLS)
    assert (last.choices[0].message.content, last.choices[0].finish_reason) == (ANSWER, "stop")


def test_tools_in_a_stream(openai_client: Any) -> None:
    asked: list[Any] = [{"role": "user", "content": "Call two tools"}]
    with openai_client.chat.completions.stream(model="scripted", messages=asked, tools=TOOLS) as stream:
        final = stream.get_final_completion()
    (choice,) = final.choices
    assert choice.finish_reason == "tool_calls"
    assert [json.loads(call.function.arguments) for call in choice.message.tool_calls] == [{"city": "Paris"}, {"city": "Rome"}]


def test_reasoning_stands_beside_the_text(openai_client: Any) -> None:
    asked: list[Any] = [{"role": "user", "content": "Think first"}]
    message = openai_client.chat.completions.create(model="scripted", messages=asked).choices[0].message
    assert (message.content, message.reasoning_content) == ("Paris", "France, so")
    effort = openai_client.chat.completions.create(model="scripted", messages=asked, reasoning_effort="low")
    assert effort.choices[0].message.content == "Paris"


def test_completions(openai_client: Any) -> None:
    made = openai_client.completions.create(model="scripted", prompt="What is it?", max_tokens=11)
    assert (made.choices[0].text, made.choices[0].finish_reason) == ("The capital", "length")
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (len("What is it?"), 11)


def test_a_stream_of_completions(lax_openai_client: Any) -> None:
    with lax_openai_client.completions.create(model="scripted", prompt="What is it?", max_tokens=11, stream=True) as stream:
        choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert "".join(choice.text or "" for choice in choices) == "The capital"
    assert [reason for choice in choices if (reason := getattr(choice, "finish_reason", None))] == ["length"]


def test_completions_of_several_prompts(openai_client: Any) -> None:
    made = openai_client.completions.create(model="scripted", prompt=["One", "Two"], max_tokens=3)
    assert [(choice.index, choice.text) for choice in made.choices] == [(0, "The"), (1, "The")]


def test_responses(lax_openai_client: Any) -> None:
    made = lax_openai_client.responses.create(model="scripted", input="What is the capital of France?", instructions="Be brief.")
    assert (made.status, made.output_text) == ("completed", ANSWER)
    assert made.usage.output_tokens == ANSWER_TOKENS


def test_a_stream_of_responses(lax_openai_client: Any) -> None:
    with lax_openai_client.responses.create(model="scripted", input="What is the capital of France?", stream=True) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert events[-1].response.output_text == ANSWER


def test_models(openai_client: Any) -> None:
    assert sorted(model.id for model in openai_client.models.list()) == ["gpt-4o", "narrow", "scripted"]


def test_a_public_name_of_another_model(openai_client: Any) -> None:
    answer = openai_client.chat.completions.create(model="gpt-4o", messages=QUESTION)
    assert answer.choices[0].message.content == ANSWER
