"""Reads one JSON object ``{"name": …, "arguments": …}`` as it comes, one character after the other.

The arguments are handed out as the very text that the model wrote, as soon as the name is known. Nothing is parsed twice, so
the pieces cannot disagree with the whole.
"""

import json
from collections.abc import Collection
from enum import Enum, auto

__all__ = ["CallScanner"]

NAME_KEYS = ("name", "function")
ARGUMENT_KEYS = ("arguments", "parameters")
BLANK = " \t\r\n"
CLOSING = {"{": "}", "[": "]"}


class _Place(Enum):
    BEFORE = auto()  # the object's brace
    KEY = auto()  # a key, or the object's end
    COLON = auto()
    VALUE = auto()  # its first character
    INSIDE = auto()  # a value
    AFTER = auto()  # a comma, or the object's end


class CallScanner:
    """One call.

    Args:
        names: of the functions there are; an object with another name is no call. None allows any.

    Attributes:
        name: once it is known.
        is_done: the object was closed.
        is_broken: what came is no such object; ``raw`` is then plain text.
        raw: everything that was taken in.
    """

    def __init__(self, names: Collection[str] | None = None) -> None:
        self._names = names
        self.name: str | None = None
        self.is_done = False
        self.is_broken = False
        self._raw: list[str] = []
        self._place = _Place.BEFORE
        self._key = ""
        self._value: list[str] = []
        self._open: list[str] = []  # brackets of the value that are not closed
        self._in_string = False
        self._is_escaped = False
        self._arguments: list[str] = []
        self._has_arguments = False
        self._num_taken = 0
        self._has_begun = False

    @property
    def raw(self) -> str:
        return "".join(self._raw)

    def feed(self, text: str) -> int:
        """Take in as much of ``text`` as belongs to the object; how many characters that was."""
        for index, character in enumerate(text):
            if self.is_done or self.is_broken:
                return index
            told = len(self._arguments)
            self._raw.append(character)
            self._take(character)
            if self._is_stray(told):
                self._raw.pop()
                return index
            if self.name is not None and not self.is_broken and (self._has_arguments or self.is_done):
                self._has_begun = True
        return len(text)

    def take_arguments(self) -> str:
        """More of the arguments than were taken before; nothing while the name is unknown."""
        if self.name is None:
            return ""
        fresh = self._arguments[self._num_taken :]
        self._num_taken = len(self._arguments)
        return "".join(fresh)

    @property
    def has_begun(self) -> bool:
        """Whether this is a call for certain: its name is known, and its arguments have begun or it is over. What comes then
        may break it, but not take it back: some of it may have been handed out."""
        return self._has_begun

    def _is_stray(self, num_told: int) -> bool:
        """Whether the latest character broke a call that had begun, and stands in none of its parts: it is what comes after."""
        return self.is_broken and self._has_begun and len(self._arguments) == num_told

    def _take(self, character: str) -> None:
        if self._place is _Place.INSIDE:
            self._inside(character)
        elif character in BLANK:
            return
        elif self._place is _Place.BEFORE:
            self._expect(character == "{", _Place.KEY)
        elif self._place is _Place.KEY:
            if character == "}":
                self._close()
            else:
                self._expect(character == '"', _Place.INSIDE)
                self._begin_value('"', is_key=True)
        elif self._place is _Place.COLON:
            self._expect(character == ":", _Place.VALUE)
        elif self._place is _Place.VALUE:
            self._place = _Place.INSIDE
            self._begin_value(character, is_key=False)
        elif character == ",":
            self._place = _Place.KEY
        elif character == "}":
            self._close()
        else:
            self.is_broken = True

    def _expect(self, is_right: bool, then: _Place) -> None:
        if is_right:
            self._place = then
        else:
            self.is_broken = True

    def _begin_value(self, character: str, *, is_key: bool) -> None:
        self._is_key = is_key
        self._value = [character]
        self._open = [character] if character in CLOSING else []
        self._in_string = character == '"'
        self._is_escaped = False
        self._is_streamed = not is_key and self._key in ARGUMENT_KEYS and character == "{" and not self._has_arguments
        if self._is_streamed:
            self._has_arguments = True
            self._arguments.append(character)

    def _inside(self, character: str) -> None:
        if not self._in_string and not self._open and (character in ",}" or character in BLANK):  # a number, true, null
            self._end_value()
            if not self.is_broken:
                self._take(character)
            return
        self._value.append(character)
        if self._is_streamed:
            self._arguments.append(character)
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = False
                if not self._open:
                    self._end_value()
        elif character == '"':
            self._in_string = True
        elif character in CLOSING:
            self._open.append(character)
        elif character in "}]":
            if not self._open or CLOSING[self._open.pop()] != character:
                self.is_broken = True
            elif not self._open:
                self._end_value()

    def _end_value(self) -> None:
        if self._is_streamed:
            self._place = _Place.AFTER
            return
        try:
            value = json.loads("".join(self._value), strict=False)
        except (ValueError, RecursionError):  # brackets nested by the thousand, too
            self.is_broken = True
            return
        if self._is_key:
            self._key = value
            self._place = _Place.COLON
            return
        self._place = _Place.AFTER
        if self._key in NAME_KEYS and isinstance(value, str) and value and self.name is None:
            self.name = _whole_characters(value)
            self.is_broken = self._names is not None and value not in self._names
        elif self._key in ARGUMENT_KEYS and not self._has_arguments:
            self._take_whole_arguments(value)

    def _take_whole_arguments(self, value: object) -> None:
        """Arguments that are no object: JSON text in a string (as in OpenAI's history), or null for none."""
        if value is None:
            value = "{}"
        self._has_arguments = True
        self._arguments.append(_whole_characters(value) if isinstance(value, str) else json.dumps(value))

    def _close(self) -> None:
        if self.name is None:
            self.is_broken = True
            return
        self.is_done = True
        if not self._has_arguments:
            self._arguments.append("{}")


def _whole_characters(text: str) -> str:
    """``text`` with a question mark for half a character (``"\\ud800"`` is valid JSON): it could not be sent to anybody."""
    return text.encode(errors="replace").decode()
