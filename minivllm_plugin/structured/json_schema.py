"""JSON schemas as llguidance takes them: put right what it reads differently from a validator, and refuse what it cannot hold.

llguidance refuses most of what it does not know by itself. This room has the rest, each entry found by validating random
outputs. Pure functions on parsed JSON; no library.
"""

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError

__all__ = ["bounded_schema"]

# Between two JSON tokens. Unbounded, a small model may fill its budget with line breaks; models are trained on a few.
WHITESPACE = r"[ \n\r\t]{0,16}"
# Without \u a key cannot be a second spelling of one that has a schema of its own.
PLAIN_ESCAPES = 'nrbtf\\"'
# What can only be written with \u: asked for by its name in a schema, it would be lost.
CONTROL = re.compile(r"\\u00(?:[01][0-9a-f]|7f)|\\x(?:[01][0-9a-f]|7f)|\\x\{0*(?:[01]?[0-9a-f]|7f)\}|\x7f", re.IGNORECASE)

ONE = ("additionalProperties", "items", "additionalItems", "not", "if", "then", "else", "contains", "propertyNames")
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")
MAPS = ("properties", "patternProperties", "$defs", "definitions")
NEAR = 1e-9
"""How near a number may come to an exclusive bound."""


def bounded_schema(schema: Mapping[str, Any] | bool) -> dict[str, Any]:
    """A schema whose instances are instances of ``schema``, with bounded white space. ``schema`` itself is left alone.

    Raises:
        InvalidRequestError: nothing could be an instance, it is nested too deeply, or it is no JSON.
        UnsupportedFeatureError: a keyword that cannot be enforced, or that validators read in different ways.
    """
    if schema is False:
        raise InvalidRequestError("the JSON schema is false, which nothing satisfies; pass a schema that allows something")
    options = {"whitespace_pattern": WHITESPACE}
    try:
        if not CONTROL.search(json.dumps(schema, allow_nan=False)):
            options["json_allowed_escapes"] = PLAIN_ESCAPES
        return {**({} if schema is True else _rewritten(schema)), "x-guidance": options}
    except InvalidRequestError:
        raise
    except RecursionError:
        raise InvalidRequestError("the JSON schema is nested too deeply; put its parts into $defs and refer to them") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequestError(f"the JSON schema holds something that is no JSON, or a number beyond all: {error}") from error


def _rewritten(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema  # true, false, or what the library will call malformed
    changed = dict(schema)
    for name in ONE:
        if name in changed:
            changed[name] = _rewritten(changed[name])
    for name in LISTS if not isinstance(changed.get("items"), list) else (*LISTS, "items"):
        if isinstance(changed.get(name), list):
            changed[name] = [_rewritten(part) for part in changed[name]]
    for name in MAPS:
        if isinstance(changed.get(name), Mapping):
            changed[name] = {key: _rewritten(part) for key, part in changed[name].items()}
    if changed.get("uniqueItems") is False:
        del changed["uniqueItems"]
    _move_exclusive_bounds(changed)
    _check_counts(changed)
    for pattern in (changed.get("pattern"), *(changed.get("patternProperties") or ())):
        _check_pattern(pattern)
    return changed


def _move_exclusive_bounds(schema: dict[str, Any]) -> None:
    """llguidance takes a whole number as bound itself when the other bound lies within the same unit: 0 < x <= 0.5 allows 0."""
    if schema.get("type") == "integer":
        return  # those are right, and of any size
    for exclusive, inclusive, away, pick in (
        ("exclusiveMinimum", "minimum", math.inf, max),
        ("exclusiveMaximum", "maximum", -math.inf, min),
    ):
        bound = schema.get(exclusive)
        if isinstance(bound, bool) or not isinstance(bound, int | float) or bound != int(bound):
            continue
        step = max(NEAR, 8 * math.ulp(bound))
        nearest = bound + math.copysign(step, away)
        other = schema.get(inclusive)
        schema[inclusive] = pick(nearest, other) if isinstance(other, int | float) and not isinstance(other, bool) else nearest
        del schema[exclusive]


def _check_counts(schema: Mapping[str, Any]) -> None:
    least, required = schema.get("minProperties"), schema.get("required")
    if isinstance(least, int | float) and least > (len(required) if isinstance(required, list) else 0) + 1:
        raise UnsupportedFeatureError(
            f"the JSON schema has minProperties={least}, which cannot be enforced (a key may come twice); "
            "name the keys in required"
        )
    factor = schema.get("multipleOf")
    if isinstance(factor, int | float) and not float(factor).is_integer():
        raise UnsupportedFeatureError(
            f"the JSON schema has multipleOf={factor}; of fractions, validators disagree about what is "
            "a multiple; use whole numbers"
        )


def _check_pattern(pattern: Any) -> None:
    """Inside of square brackets Rust's regular expressions have operators that ECMA's and Python's do not."""
    if not isinstance(pattern, str):
        return
    is_class, position = False, 0
    while position < len(pattern):
        character = pattern[position]
        if character == "\\":
            position += 2
            continue
        if is_class and (character == "[" or pattern[position : position + 2] in ("&&", "--", "~~")):
            raise UnsupportedFeatureError(
                f"the pattern {pattern!r:.200} has {pattern[position : position + 2]!r} inside of square brackets, which "
                "engines read in different ways; put a backslash before it"
            )
        if character == "[" and not is_class:
            is_class = True
            position += 2 if pattern[position + 1 : position + 2] == "^" else 1
            if pattern[position : position + 1] == "]":  # the first one stands for itself
                position += 1
            continue
        if character == "]":
            is_class = False
        position += 1
