"""Reasoning between tags: ``<think>`` … ``</think>``, as DeepSeek-R1, Qwen3 and their kin write it."""

from minivllm_plugin.parsing.records import ReasoningDelta

__all__ = ["ThinkParser"]

BLANK = " \t\r\n"


class ThinkParser:
    """One passage of reasoning at the beginning of an answer.

    White space around both parts is dropped. Without an opening tag at its start an answer has no reasoning, unless the
    prompt has opened it. Reasoning that is never closed is reasoning to its end.

    Args:
        is_open: the prompt ends with the opening tag (some models repeat it).
    """

    OPEN = "<think>"
    CLOSE = "</think>"

    def __init__(self, *, is_open: bool = False) -> None:
        self._held = ""
        self._is_open = is_open
        self._part = "start"
        self._strip = True  # white space at the beginning of the present part

    def feed(self, text: str) -> ReasoningDelta:
        self._held += text
        return self._advance(is_last=False)

    def finish(self) -> ReasoningDelta:
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> ReasoningDelta:
        if self._part == "start" and not self._decide(is_last=is_last):
            return ReasoningDelta()
        reasoning = self._read_reasoning(is_last=is_last) if self._part == "reasoning" else ""
        return ReasoningDelta(reasoning, self._read_answer() if self._part == "answer" else "")

    def _decide(self, *, is_last: bool) -> bool:
        """What the answer begins with; False while that cannot be said."""
        rest = self._held.lstrip(BLANK)
        if rest.startswith(self.OPEN):
            self._held, self._part = rest[len(self.OPEN) :], "reasoning"
        elif self.OPEN.startswith(rest) and not is_last:
            return False
        elif self._is_open:
            self._part = "reasoning"
        else:
            self._part, self._strip = "answer", False  # nothing was cut off: its white space is its own
        return True

    def _read_reasoning(self, *, is_last: bool) -> str:
        if self._strip:
            self._held = self._held.lstrip(BLANK)
            self._strip = not self._held
        end = self._held.find(self.CLOSE)
        if end >= 0:
            text, self._held = self._held[:end].rstrip(BLANK), self._held[end + len(self.CLOSE) :]
            self._part, self._strip = "answer", True
            return text
        if is_last:
            text, self._held = self._held.rstrip(BLANK), ""
            return text
        keep = next((size for size in range(len(self.CLOSE) - 1, 0, -1) if self._held.endswith(self.CLOSE[:size])), 0)
        safe = len(self._held[: len(self._held) - keep].rstrip(BLANK))
        text, self._held = self._held[:safe], self._held[safe:]
        return text

    def _read_answer(self) -> str:
        if self._strip:
            self._held = self._held.lstrip(BLANK)
            self._strip = not self._held
        text, self._held = self._held, ""
        return text
