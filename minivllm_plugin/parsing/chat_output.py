"""One answer of a chat, taken apart as it comes: reasoning first, then tool calls in what is left, then text."""

from typing import NamedTuple

from minivllm_plugin.parsing.records import ReasoningParser, ToolCall, ToolCallDelta, ToolParser, collect_calls

__all__ = ["ChatDelta", "ChatOutputParser", "ParsedAnswer"]


class ChatDelta(NamedTuple):
    """What is new in an answer."""

    reasoning: str = ""
    text: str = ""
    calls: tuple[ToolCallDelta, ...] = ()


class ParsedAnswer(NamedTuple):
    """A whole answer."""

    reasoning: str
    text: str
    calls: list[ToolCall]


class ChatOutputParser:
    """For one completion; either parser may be missing."""

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self.num_calls = 0

    @property
    def is_plain(self) -> bool:
        """Whether text comes out as it goes in."""
        return self._reasoning is None and self._tools is None

    def feed(self, text: str) -> ChatDelta:
        """More of the answer."""
        reasoning, rest = ("", text) if self._reasoning is None else self._reasoning.feed(text)
        return self._divide(reasoning, rest)

    def finish(self) -> ChatDelta:
        """There is no more: what was held back."""
        reasoning, rest = ("", "") if self._reasoning is None else self._reasoning.finish()
        before = self._divide(reasoning, rest)
        if self._tools is None:
            return before
        last = self._tools.finish()
        self._count(last.calls)
        return ChatDelta(before.reasoning, before.text + last.text, before.calls + last.calls)

    def parse(self, text: str) -> ParsedAnswer:
        """A whole answer at once, on a fresh parser."""
        first, last = self.feed(text), self.finish()
        calls = collect_calls([*first.calls, *last.calls])
        return ParsedAnswer(first.reasoning + last.reasoning, first.text + last.text, calls)

    def _divide(self, reasoning: str, rest: str) -> ChatDelta:
        if self._tools is None or not rest:
            return ChatDelta(reasoning, rest)
        delta = self._tools.feed(rest)
        self._count(delta.calls)
        return ChatDelta(reasoning, delta.text, delta.calls)

    def _count(self, calls: tuple[ToolCallDelta, ...]) -> None:
        self.num_calls = max([self.num_calls, *(call.index + 1 for call in calls)])
