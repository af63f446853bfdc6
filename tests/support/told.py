"""All that a LiteLLM answer says, as plain data that can be compared."""

from typing import Any

__all__ = ["told"]


def told(answer: Any) -> tuple[Any, ...]:
    """Of each choice its text, thoughts, calls and end; and how many tokens the prompt and the completion have."""
    choices = [
        (
            choice.message.content or "",
            getattr(choice.message, "reasoning_content", None),
            [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []],
            choice.finish_reason,
        )
        for choice in answer.choices
    ]
    return choices, answer.usage.prompt_tokens, answer.usage.completion_tokens
