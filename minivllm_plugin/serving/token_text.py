"""Token ids become text, one token at a time: the only place that knows how a vocabulary spells bytes.

A :class:`PieceTable` belongs to one tokenizer and is shared by all threads (entries are only ever added). A stream made
by :meth:`PieceTable.stream` belongs to one request and one thread; it never hands out half a character.

Two families are decoded from bytes, exactly and in constant time a token: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM2)
and SentencePiece style (Llama 2, Gemma, Mistral: ``▁`` for a space, ``<0xE2>`` for a byte). Invalid UTF-8 becomes one
U+FFFD for each maximal ill-formed part (Unicode 3.9, what both Python and Rust do). Anything else goes through the
tokenizer library with a window of the last tokens.
"""

import json
from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

__all__ = ["PieceTable", "TextStream"]

REPLACEMENT = "\ufffd"
MAX_PENDING_TOKENS = 8  # of a window whose end still looks like half a character; a character has at most 4 bytes
CONTEXT_TOKENS = 6  # prompt tokens that a window starts with, so that spacing at the seam is right


class TextStream(Protocol):
    """Text of one request, growing token by token."""

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is still incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that was cut."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _ByteRules:
    """How one vocabulary spells text. Mirrors the ``decoder`` of a ``tokenizer.json``."""

    byte_level: bool = False
    replaces: tuple[tuple[str, str], ...] = ()
    byte_fallback: bool = False
    strip: tuple[str, int] = ("", 0)  # this character, so many times, at the very beginning of the text
    drop_in_first: str = ""  # removed from the first token altogether (Metaspace's dummy prefix)


class PieceTable:
    """Token id to the text or the bytes it stands for."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._rules = _byte_rules(backend)
        self._pieces: dict[int, str | bytes] = {}

    def stream(self, skip_ids: AbstractSet[int], context_ids: Sequence[int] = ()) -> TextStream:
        """A fresh stream that continues ``context_ids`` (a prompt) and leaves out the tokens in ``skip_ids``."""
        if self._rules is None:
            return _WindowStream(self._backend, skip_ids, context_ids)
        return _ByteStream(self, self._rules, skip_ids, context_ids)

    def decode(self, token_ids: Iterable[int], skip_ids: AbstractSet[int]) -> str:
        """All of a text at once; by construction what a stream without context adds up to."""
        if self._rules is None:
            return self._backend.decode([i for i in token_ids if i not in skip_ids], skip_special_tokens=False)
        stream = _ByteStream(self, self._rules, skip_ids, ())
        return "".join([stream.push(token_id) for token_id in token_ids]) + stream.flush()

    def piece(self, token_id: int) -> str | bytes:
        """Whole characters as ``str``, else ``bytes``; empty for ids that the vocabulary lacks (padded embeddings)."""
        piece = self._pieces.get(token_id)
        if piece is None:
            token = _token(self._backend, token_id)
            if token is None or self._rules is None:
                return ""
            piece = self._pieces[token_id] = _spell(token, self._rules)
        return piece

    def first_piece(self, token_id: int) -> str | bytes:
        """Like :meth:`piece`, for the first token of a text."""
        if self._rules is None or not self._rules.drop_in_first:
            return self.piece(token_id)
        token = _token(self._backend, token_id)
        return "" if token is None else _spell(token.replace(self._rules.drop_in_first, ""), self._rules)


class _ByteStream:
    """Bytes in, whole characters out; at most three bytes wait."""

    __slots__ = ("_at_start", "_pending", "_pieces", "_skip_ids", "_strip_char", "_strip_left", "_table")

    def __init__(self, table: PieceTable, rules: _ByteRules, skip_ids: AbstractSet[int], context_ids: Sequence[int]) -> None:
        self._table = table
        self._pieces = table._pieces  # read directly: this is the per-token path
        self._skip_ids = skip_ids
        self._pending = b""
        # Only a text's very first token or character is special, and behind a visible prompt token we are not there.
        self._at_start = not any(i not in skip_ids and table.piece(i) for i in context_ids)
        self._strip_char, self._strip_left = rules.strip if self._at_start else ("", 0)

    def push(self, token_id: int) -> str:
        if token_id in self._skip_ids:
            return ""
        if self._at_start:
            piece = self._table.first_piece(token_id)
            self._at_start = _token(self._table._backend, token_id) is None
        else:
            known = self._pieces.get(token_id)
            piece = self._table.piece(token_id) if known is None else known
        if not self._pending and isinstance(piece, str):
            text = piece
        else:
            data = self._pending + (piece.encode() if isinstance(piece, str) else piece)
            text, used = utf_8_decode(data, "replace", False)
            self._pending = data[used:]
        return self._strip(text) if self._strip_left else text

    def flush(self) -> str:
        text = utf_8_decode(self._pending, "replace", True)[0]
        self._pending = b""
        return self._strip(text) if self._strip_left else text

    def _strip(self, text: str) -> str:
        while text and self._strip_left:
            if text[0] != self._strip_char:
                self._strip_left = 0
                break
            text = text[1:]
            self._strip_left -= 1
        return text


class _WindowStream:
    """For decoders that look at neighbouring tokens: decode the last few with and without the new one.

    The window starts at the last token whose text was handed out, so its length is bounded and the whole is linear.
    """

    __slots__ = ("_backend", "_ids", "_read", "_read_text", "_skip_ids")

    def __init__(self, backend: Backend, skip_ids: AbstractSet[int], context_ids: Sequence[int]) -> None:
        self._backend = backend
        self._skip_ids = skip_ids
        self._ids = [i for i in context_ids if i not in skip_ids][-CONTEXT_TOKENS:]
        while self._ids and self._decode(self._ids).endswith(REPLACEMENT):
            self._ids.pop()  # a prompt that ends within a character: the cut belongs to the prompt
        self._read = len(self._ids)
        self._read_text = self._decode(self._ids)

    def push(self, token_id: int) -> str:
        if token_id in self._skip_ids:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        waiting = len(self._ids) - self._read
        if len(text) <= len(self._read_text) or (text.endswith(REPLACEMENT) and waiting < MAX_PENDING_TOKENS):
            return ""
        return self._hand_out(text)

    def flush(self) -> str:
        text = self._decode(self._ids)
        return self._hand_out(text) if len(text) > len(self._read_text) else ""

    def _hand_out(self, text: str) -> str:
        delta = text[len(self._read_text) :]
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._read_text = self._decode(self._ids)
        return delta

    def _decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)


def _token(backend: Backend, token_id: int) -> str | None:
    try:
        return backend.id_to_token(token_id)
    except OverflowError:  # negative, or more than 32 bits
        return None


def _spell(token: str, rules: _ByteRules) -> str | bytes:
    data = _token_bytes(token, rules)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _token_bytes(token: str, rules: _ByteRules) -> bytes:
    if rules.byte_level:
        try:
            return bytes([_BYTE_OF_CHAR[char] for char in token])
        except KeyError:  # an added token with characters outside the alphabet stands for itself
            return token.encode()
    for old, new in rules.replaces:
        token = token.replace(old, new)
    if rules.byte_fallback and len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token.encode()
    return token.encode()


def _byte_rules(backend: Backend) -> _ByteRules | None:
    """Rules equivalent to the backend's decoder, or None when it is of another kind."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return _ByteRules(byte_level=True)
    if kinds == ["Metaspace"]:
        mark = steps[0]["replacement"]
        first = "" if steps[0].get("prepend_scheme", "always") == "never" else mark
        return _ByteRules(replaces=((mark, " "),), drop_in_first=first)
    replaces: list[tuple[str, str]] = []
    while steps and steps[0]["type"] == "Replace" and "String" in steps[0]["pattern"]:
        replaces.append((steps[0]["pattern"]["String"], steps[0]["content"]))
        steps = steps[1:]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteFallback", "Fuse"]:
        return _ByteRules(replaces=tuple(replaces), byte_fallback=True)
    if kinds == ["ByteFallback", "Fuse", "Strip"] and steps[2]["stop"] == 0:
        strip = (steps[2]["content"], steps[2]["start"])
        return _ByteRules(replaces=tuple(replaces), byte_fallback=True, strip=strip)
    return None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 bytes are themselves, the other 68 follow from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}


_BYTE_OF_CHAR = _byte_alphabet()
