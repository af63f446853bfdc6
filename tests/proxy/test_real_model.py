"""The real SmolLM2-135M behind the proxy: what needs logits or grammars, under OpenAI's client in strict mode."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = "smollm2-135m"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "enum": [1, 2]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}


class Capital(BaseModel):
    country: Literal["France", "Italy"]
    is_large: bool


@pytest.fixture(scope="module")
def client(start: Callable[..., Any], smollm2_gguf: Path) -> Iterator[Any]:
    import openai

    command = ("-c", "from minivllm_plugin.cli import main; main()", "serve", MODEL, "--port", "0")
    served = start(*command, HF_HUB_OFFLINE="1")
    with openai.OpenAI(
        base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=120, _strict_response_validation=True
    ) as made:
        yield made
    assert served.request("/health")[1]["engines"][MODEL]["num_running"] == 0


def test_chat_and_stream_agree(client: Any) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    with client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}) as stream:
        chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.choices[0].message.content
    assert "Paris" in whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_logprobs(client: Any) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 5, "logprobs": True}
    whole = client.chat.completions.create(**options, top_logprobs=3).choices[0]
    entries = whole.logprobs.content
    assert len(entries) == 5
    for entry in entries:
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0
        assert len(entry.top_logprobs) == 3
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.0001
    with client.chat.completions.create(**options, top_logprobs=3, stream=True) as stream:
        streamed = [
            entry for chunk in stream for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content or []
        ]
    assert [entry.token for entry in streamed] == [entry.token for entry in entries]


def test_parse_into_a_pydantic_class(client: Any) -> None:
    for temperature in (0, 1.0):
        made = client.chat.completions.parse(
            model=MODEL, messages=QUESTION, response_format=Capital, temperature=temperature, max_tokens=100
        )
        assert isinstance(made.choices[0].message.parsed, Capital)
        assert made.choices[0].finish_reason == "stop"


def test_a_call_that_must_be_made(client: Any) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice="required", parallel_tool_calls=False, max_tokens=100
    )
    (call,) = made.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_weather"
    assert arguments["city"] in ("Paris", "Rome")
    assert arguments["days"] in (1, 2)
    assert made.choices[0].finish_reason == "tool_calls"
