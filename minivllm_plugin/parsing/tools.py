"""Tool calls in text: in tags, as Hermes and Qwen models write them, or as bare JSON, as Llama models do."""

from collections.abc import Collection

from minivllm_plugin.parsing.call_scanner import BLANK, CallScanner
from minivllm_plugin.parsing.records import ToolCallDelta, ToolDelta

__all__ = ["HermesToolParser", "JsonToolParser"]


class _CallReader:
    """One call in the making: its scanner, and whether its name was handed out. ``names``: others are not called."""

    def __init__(self, index: int, names: Collection[str] | None = None) -> None:
        self.scanner = CallScanner(names)
        self._index = index
        self._is_named = False

    def news(self) -> list[ToolCallDelta]:
        """Pieces that were not handed out yet; none while it may still turn out to be plain text."""
        scanner = self.scanner
        if not scanner.has_begun:
            return []
        name = None if self._is_named else scanner.name
        arguments = scanner.take_arguments()
        if name is None and not arguments:
            return []
        self._is_named = True
        return [ToolCallDelta(self._index, name, arguments)]


class HermesToolParser:
    """``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, any number of them, with text before, between and after.

    Source: the format of NousResearch's Hermes function calling, which Qwen2.5 and Qwen3 use. White space next to a call is
    dropped. A tag that no call follows is text. A call cut short is handed out as far as it came.
    """

    OPEN = "<tool_call>"
    CLOSE = "</tool_call>"

    def __init__(self) -> None:
        self._held = ""
        self._reader: _CallReader | None = None
        self._prefix = ""  # what stood before the object of the present call: to be given back if it is none
        self._num_calls = 0
        self._after_call = False  # white space is dropped until there is text
        self._is_closing = False  # a call is over, its closing tag may follow

    def feed(self, text: str) -> ToolDelta:
        self._held += text
        return self._advance(is_last=False)

    def finish(self) -> ToolDelta:
        return self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> ToolDelta:
        texts: list[str] = []
        calls: list[ToolCallDelta] = []
        while True:
            if self._reader is not None:
                progressed = self._read_call(texts, calls, is_last=is_last)
            elif self._is_closing:
                progressed = self._read_closing(is_last=is_last)
            else:
                progressed = self._read_text(texts, is_last=is_last)
            if not progressed:
                return ToolDelta("".join(texts), tuple(calls))

    def _read_text(self, texts: list[str], *, is_last: bool) -> bool:
        """Hand out text up to a tag, or up to what may be the beginning of one. True: there is a call to read."""
        if self._after_call:
            self._held = self._held.lstrip(BLANK)
            if self._held:
                self._after_call = False
        start = self._held.find(self.OPEN)
        if start >= 0:
            before = self._held[:start]
            kept = before.rstrip(BLANK)
            self._prefix = before[len(kept) :] + self.OPEN
            texts.append(kept)
            self._held = self._held[start + len(self.OPEN) :]
            self._reader = _CallReader(self._num_calls)
            return True
        end = len(self._held) if is_last else _safe_length(self._held, self.OPEN)
        texts.append(self._held[:end])
        self._held = self._held[end:]
        return False

    def _read_call(self, texts: list[str], calls: list[ToolCallDelta], *, is_last: bool) -> bool:
        reader = self._reader
        assert reader is not None
        used = reader.scanner.feed(self._held)
        self._held = self._held[used:]
        calls += reader.news()
        if reader.scanner.is_broken and not reader.scanner.has_begun:
            self._give_back(reader, texts)
            return True
        if reader.scanner.is_done:
            self._reader, self._is_closing = None, True
            self._num_calls += 1
            return True
        if reader.scanner.is_broken:  # after its arguments began: they stay as they are, and what follows is text
            self._reader, self._is_closing = None, True
            self._num_calls += 1
            return True
        if is_last and not reader.scanner.has_begun:
            self._give_back(reader, texts)
            return True
        return False

    def _give_back(self, reader: _CallReader, texts: list[str]) -> None:
        """It was no call: its tag is text, and what came after it is looked at again."""
        texts.append(self._prefix)
        self._held = reader.scanner.raw + self._held
        self._reader = None

    def _read_closing(self, *, is_last: bool) -> bool:
        rest = self._held.lstrip(BLANK)
        if rest.startswith(self.CLOSE):
            self._held = rest[len(self.CLOSE) :]
        elif self.CLOSE.startswith(rest) and not is_last:
            return False
        else:
            self._held = rest  # models forget the tag; the object was whole
        self._is_closing, self._after_call = False, True
        return bool(self._held)


class JsonToolParser:
    """``{"name": …, "parameters": {…}}`` as the whole answer; several follow each other, or stand in a list.

    Source: Llama 3's JSON tool calls. An answer that does not begin with such an object is text.

    Args:
        names: of the tools there are: an object with another ``name`` is an answer about something, not a call.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._reader: _CallReader | None = None
        self._num_calls = 0
        self._is_text = False
        self._consumed = ""  # of an answer that may still turn out to be text

    def feed(self, text: str) -> ToolDelta:
        if self._is_text:
            return ToolDelta(text)
        self._held += text
        return self._advance(is_last=False)

    def finish(self) -> ToolDelta:
        return ToolDelta() if self._is_text else self._advance(is_last=True)

    def _advance(self, *, is_last: bool) -> ToolDelta:
        calls: list[ToolCallDelta] = []
        while True:
            if self._reader is None:
                rest = self._held.lstrip(BLANK + ("[" if not self._num_calls else ",;]"))
                if not rest:
                    return self._all_text(calls) if is_last and not self._num_calls else ToolDelta("", tuple(calls))
                self._consumed += self._held[: len(self._held) - len(rest)]
                self._held = rest
                if not rest.startswith("{"):
                    return self._all_text(calls)
                self._reader = _CallReader(self._num_calls, self._names)
            scanner = self._reader.scanner
            used = scanner.feed(self._held)
            self._held = self._held[used:]
            calls += self._reader.news()
            if scanner.is_done and scanner.has_begun:
                self._reader = None
                self._num_calls += 1
                self._consumed = ""
                continue
            if (scanner.is_broken or is_last) and not scanner.has_begun:
                self._held = scanner.raw + self._held
                self._reader = None
                return self._all_text(calls)
            if scanner.is_broken:  # after its arguments began: they stay as they are, and what follows is text
                self._reader = None
                return self._all_text(calls)
            return ToolDelta("", tuple(calls))

    def _all_text(self, calls: list[ToolCallDelta]) -> ToolDelta:
        text, self._held, self._consumed = self._consumed + self._held, "", ""
        self._is_text = True
        return ToolDelta(text, tuple(calls))


def _safe_length(text: str, tag: str) -> int:
    """How much of ``text`` cannot belong to a ``tag`` that is still coming, nor to the white space before it."""
    keep = 0
    for size in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:size]):
            keep = size
            break
    head = text[: len(text) - keep]
    return len(head.rstrip(BLANK))
