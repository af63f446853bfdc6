"""What a caller may ask of the form of a completion. Frozen and checked on construction; knows no tokenizer and no library.

Names are vLLM's ``StructuredOutputsParams``.
"""

import json as jsonlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from minivllm_plugin.errors import InvalidRequestError

__all__ = ["MAX_GRAMMAR_CHARACTERS", "StructuralTag", "StructuredOutputsParams"]

MAX_GRAMMAR_CHARACTERS = 256 * 1024
MAX_CHOICES = 4096

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")


class StructuralTag(NamedTuple):
    """One kind of constrained passage in otherwise free text.

    Attributes:
        trigger: text at which the constraint begins, for example ``<tool_call>``.
        begin: what the passage begins with; starts with ``trigger``.
        schema: JSON schema of its content, or a grammar as text.
        end: what closes it.
    """

    trigger: str
    begin: str
    schema: Mapping[str, Any] | str
    end: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StructuredOutputsParams:
    """The form of one completion. Exactly one of these is set.

    Attributes:
        json: a JSON schema, as a dictionary or as text (or a pydantic model class, whose schema is taken).
        json_object: True: any JSON object.
        regex: the whole completion matches (Rust ``regex`` syntax: no look-around, no back-references).
        choice: the completion is one of these strings.
        grammar: a Lark grammar with a rule ``start``, or GBNF with a rule ``root``.
        structural_tag: free text with constrained passages: a list of :class:`StructuralTag`.
        kind: the name of the field that is set.

    Raises:
        InvalidRequestError: none or several are set, or one has a wrong type or size.
    """

    json: Mapping[str, Any] | str | type | bool | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | Sequence[str] | None = None
    grammar: str | None = None
    structural_tag: tuple[StructuralTag, ...] | Sequence[Any] | None = None
    kind: str = field(init=False, repr=False, compare=False, default="")

    def __post_init__(self) -> None:
        given = [name for name in KINDS if getattr(self, name) not in (None, False) or (name == "json" and self.json is False)]
        if len(given) != 1:
            found = ", ".join(given) if given else "none"
            raise InvalidRequestError(f"structured outputs need exactly one of {', '.join(KINDS)}; got {found}")
        object.__setattr__(self, "kind", given[0])
        check = getattr(self, f"_check_{given[0]}")
        object.__setattr__(self, given[0], check(getattr(self, given[0])))

    @property
    def key(self) -> str:
        """Text that is equal exactly for equal constraints."""
        value = getattr(self, self.kind)
        return f"{self.kind}:{value if isinstance(value, str) else jsonlib.dumps(value)}"

    def _check_json(self, value: Any) -> str:
        if hasattr(value, "model_json_schema"):  # a pydantic model, without importing pydantic
            value = value.model_json_schema()
        if isinstance(value, str):
            try:
                value = jsonlib.loads(value)
            except ValueError as error:
                raise InvalidRequestError(f"the JSON schema is no valid JSON: {error}") from error
        if not isinstance(value, Mapping | bool):
            raise InvalidRequestError(f"a JSON schema must be a dictionary, JSON text or a pydantic model, got {value!r:.100}")
        try:
            text = jsonlib.dumps(value if isinstance(value, bool) else dict(value), ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the JSON schema holds something that is no JSON: {error}") from error
        return _bounded("JSON schema", text)

    def _check_json_object(self, value: Any) -> bool:
        if value is not True:
            raise InvalidRequestError(f"json_object must be True or left out, got {value!r:.100}")
        return True

    def _check_regex(self, value: Any) -> str:
        return _bounded("regex", value)

    def _check_grammar(self, value: Any) -> str:
        return _bounded("grammar", value)

    def _check_choice(self, value: Any) -> tuple[str, ...]:
        if isinstance(value, str) or not isinstance(value, Sequence) or not value:
            raise InvalidRequestError(f"choice must be a non-empty list of strings, got {value!r:.100}")
        for entry in value:
            if not isinstance(entry, str) or not entry:
                raise InvalidRequestError(f"choice must hold non-empty strings, got {entry!r:.100}")
        if len(value) > MAX_CHOICES:
            raise InvalidRequestError(f"choice has {len(value)} entries, at most {MAX_CHOICES} are allowed; use a grammar")
        _bounded("choice", "".join(value))
        return tuple(value)

    def _check_structural_tag(self, value: Any) -> tuple[StructuralTag, ...]:
        if isinstance(value, str | Mapping) or not isinstance(value, Sequence) or not value:
            raise InvalidRequestError(f"structural_tag must be a non-empty list of StructuralTag, got {value!r:.100}")
        tags = []
        for entry in value:
            try:
                tag = StructuralTag(**entry) if isinstance(entry, Mapping) else StructuralTag(*entry)
            except TypeError as error:
                raise InvalidRequestError(f"a structural tag has trigger, begin, schema and end, got {entry!r:.200}") from error
            if not all(isinstance(part, str) for part in (tag.trigger, tag.begin, tag.end)) or not tag.trigger:
                raise InvalidRequestError(f"trigger, begin and end of a structural tag must be text, got {entry!r:.200}")
            if not tag.begin.startswith(tag.trigger):
                raise InvalidRequestError(f"begin {tag.begin!r} of a structural tag must start with its trigger {tag.trigger!r}")
            schema = tag.schema if isinstance(tag.schema, str) else self._check_json(tag.schema)
            tags.append(tag._replace(schema=_bounded("schema of a structural tag", schema)))
        return tuple(tags)


def _bounded(what: str, text: Any) -> str:
    if not isinstance(text, str) or not text.strip():
        raise InvalidRequestError(f"the {what} must be non-empty text, got {text!r:.100}")
    if len(text) > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequestError(f"the {what} has {len(text)} characters, at most {MAX_GRAMMAR_CHARACTERS} are allowed")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"the {what} holds a character that is no Unicode: {error}") from error
    return text
