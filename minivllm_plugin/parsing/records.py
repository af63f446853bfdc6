"""What parsers return. Immutable."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

__all__ = ["ReasoningDelta", "ReasoningParser", "ToolCall", "ToolCallDelta", "ToolDelta", "ToolParser", "collect_calls"]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of one tool call.

    Attributes:
        index: 0 for the first call of an answer.
        name: set in the first piece of a call only.
        arguments: more of its arguments, JSON text; all pieces joined are the arguments.
    """

    index: int
    name: str | None
    arguments: str


class ToolDelta(NamedTuple):
    """What is new in an answer: plain text, and pieces of tool calls."""

    text: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class ReasoningDelta(NamedTuple):
    """What is new in an answer: reasoning, and what is none."""

    reasoning: str = ""
    text: str = ""


class ToolCall(NamedTuple):
    """One whole call. ``arguments`` is JSON text, as in OpenAI's API; cut short if the completion was."""

    name: str
    arguments: str


class ToolParser(Protocol):
    """Finds tool calls in one answer. Joined over all pieces, text and calls do not depend on how the text was cut."""

    def feed(self, text: str) -> ToolDelta:
        """More of the answer. What may yet become a call is held back."""
        ...

    def finish(self) -> ToolDelta:
        """There is no more: what was held back."""
        ...


class ReasoningParser(Protocol):
    """Tells reasoning from answer. Joined over all pieces, both do not depend on how the text was cut."""

    def feed(self, text: str) -> ReasoningDelta: ...

    def finish(self) -> ReasoningDelta: ...


def collect_calls(deltas: Sequence[ToolCallDelta]) -> list[ToolCall]:
    """Whole calls from their pieces, in order."""
    names: dict[int, str] = {}
    arguments: dict[int, list[str]] = {}
    for delta in deltas:
        names[delta.index] = names.get(delta.index) or delta.name or ""
        arguments.setdefault(delta.index, []).append(delta.arguments)
    return [ToolCall(names[index], "".join(arguments[index])) for index in sorted(names)]
