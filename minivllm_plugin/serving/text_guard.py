"""Keeps user text from turning into control tokens on its way through a chat template.

Control-token text in any string is replaced by a private-use character before rendering; the encoder puts the text back
where only plain text can come of it. A second character marks the edges of strings that could complete a control token
together with what the template writes next to them (``<|im_`` + ``end|>``). Both are chosen so that they occur nowhere
in the conversation; a conversation without such text is left exactly as it is.

Out of scope: a template that deletes from the *middle* of a string and so joins two harmless halves. None is known that
does this to text which a user, not the model, wrote.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.serving.control_tokens import ControlTokens

__all__ = ["TextGuard"]

# One character each, since templates trim, split and slice; in the basic plane, so that a JSON escape is \uXXXX.
PLACEHOLDERS = range(0xE000, 0xF900)


@dataclass(frozen=True, slots=True)
class TextGuard:
    """Placeholders of one conversation.

    Attributes:
        control_tokens: of the tokenizer.
        literals: placeholder to the control-token text it stands for.
        joint: the edge mark; empty when nothing needs guarding.
    """

    control_tokens: ControlTokens
    literals: Mapping[str, str] = field(default_factory=dict)
    joint: str = ""

    @classmethod
    def of(cls, control_tokens: ControlTokens, data: object, template: str) -> "TextGuard":
        """A guard for all strings in ``data`` (JSON types), which ``template`` is going to render."""
        strings = list(_strings(data))
        typed = sorted({token for string in strings for token in control_tokens.pattern.findall(string)})
        if not typed and not any(_touches_edge(string, control_tokens) for string in strings):
            return cls(control_tokens)
        free = _unused_characters("\0".join([*strings, template]))
        return cls(control_tokens, {next(free): token for token in typed}, next(free))

    def protect(self, data: Any) -> Any:
        """A copy of ``data`` with every string, keys included, made safe."""
        if not self.joint:
            return data
        if isinstance(data, str):
            return self._protect_text(data)
        if isinstance(data, dict):
            return {self._protect_text(key): self.protect(value) for key, value in data.items()}
        if isinstance(data, list):
            return [self.protect(value) for value in data]
        return data

    def restore_escapes(self, rendered: str) -> str:
        """Placeholders that the template wrote as JSON escapes become characters again."""
        for character in (*self.literals, self.joint):
            if character:
                rendered = rendered.replace(_escape(character), character)
        return rendered

    def _protect_text(self, text: str) -> str:
        placeholder_of = {token: character for character, token in self.literals.items()}
        text = self.control_tokens.pattern.sub(lambda match: placeholder_of[match.group()], text)
        core = text.strip()  # the mark sits inside the white space, which templates trim
        if not core:
            return text
        begin = text.index(core)
        before, after = text[:begin], text[begin + len(core) :]
        if core.startswith(self.control_tokens.endings):
            core = self.joint + core
        if core.endswith(self.control_tokens.beginnings):
            core += self.joint
        return before + core + after


def _touches_edge(text: str, control_tokens: ControlTokens) -> bool:
    core = text.strip()
    return core.startswith(control_tokens.endings) or core.endswith(control_tokens.beginnings)


def _strings(data: object) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for key, value in data.items():
            yield key
            yield from _strings(value)
    elif isinstance(data, list):
        for value in data:
            yield from _strings(value)


def _escape(character: str) -> str:
    return f"\\u{ord(character):04x}"


def _unused_characters(text: str) -> Iterator[str]:
    lowered = text.lower()
    for code in PLACEHOLDERS:
        if (character := chr(code)) not in text and _escape(character) not in lowered:
            yield character
    raise InvalidRequestError("the conversation holds control-token text and every private-use character; remove one of both")
