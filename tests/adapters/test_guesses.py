"""Guessed tokens under answers that are parsed: calls, thoughts, stop strings and characters of several bytes, all of which may
begin, end or be cut in the midst of the tokens of one step. Everything is told as it is without guesses."""

import asyncio
from typing import Any

import litellm
import pytest
from live_engine import Live
from told import told

MODEL = "minivllm/live"
MESSAGES = [{"role": "user", "content": "go on"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": [1, 1, 1, 1, 1, 1]}}\n</tool_call>'
REFRAIN = "round and round we go, "
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": (REFRAIN * 5, {}),
    "cut": (REFRAIN * 5, {"max_tokens": 77}),
    "characters of several bytes": ("🌶é" * 20, {}),
    "cut within a character": ("🌶" * 20, {"max_tokens": 42}),
    "stop string": (f"{REFRAIN * 4}stop here, {REFRAIN}", {"stop": ["stop here"]}),
    "stop string of what repeats": (REFRAIN * 6, {"stop": ["go, round and round we go, round and round we go"]}),
    "stop string of several bytes": ("🌶 é " * 12, {"stop": ["é 🌶 é 🌶 é 🌶 é 🌶 é 🌶"]}),
    "several choices": (REFRAIN * 4, {"n": 3}),
    "calls": (f"Let me see.\n{CALL}\n{CALL}\n{CALL}", {"tools": TOOLS}),
    "a call that is cut": (f"{CALL}\n{CALL}", {"tools": TOOLS, "max_tokens": len(CALL) + 30}),
    "thoughts": (f"<think>{REFRAIN * 3}</think>\n\n{REFRAIN * 3}", {}),
    "thoughts that are cut": (f"<think>{REFRAIN * 5}</think>", {"max_tokens": 90}),
    "thoughts, then calls": (f"<think>{REFRAIN * 3}</think>\n{CALL}\n{CALL}", {"tools": TOOLS}),
}


def _streamed(options: dict[str, Any], *, asynchronous: bool) -> Any:
    options = {**options, "stream": True, "stream_options": {"include_usage": True}}

    async def read() -> list[Any]:
        stream: Any = await litellm.acompletion(**options)
        return [chunk async for chunk in stream]

    return litellm.stream_chunk_builder(asyncio.run(read()) if asynchronous else list(litellm.completion(**options)))


@pytest.mark.parametrize("kind", ANSWERS)
def test_all_is_told_as_without_guesses(kind: str, live: Live) -> None:
    live.answer, parameters = ANSWERS[kind]
    options = {"model": MODEL, "messages": MESSAGES, "max_tokens": 500, **parameters}
    live.options["options"] = {"reasoning_parser": "think", "max_num_sequences": 4}
    expected = told(litellm.completion(**options))
    assert live.llm.snapshot().num_drafted_tokens == 0
    live.llm.close()
    live.options["options"]["num_speculative_tokens"] = 7
    for answer in (
        litellm.completion(**options),
        _streamed(options, asynchronous=False),
        _streamed(options, asynchronous=True),
    ):
        assert told(answer) == expected
    assert live.llm.snapshot().num_accepted_tokens > 50
