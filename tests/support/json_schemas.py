"""JSON schemas of every kind that structured outputs take, made up from a seed, and checks of what is written under them."""

import json
import random
from collections.abc import Callable
from typing import Any

from jsonschema import Draft202012Validator

__all__ = ["make_schema", "make_schemas", "problem_with"]

Schema = dict[str, Any]
NAMES = ("id", "name", "size", "tags", "note", "a b", "ключ", 'q"t', "x")
PATTERNS = ("^[a-c]{1,4}$", "^(yes|no)$", "^[0-9]{2}-[0-9]{2}$", "^x?y*z$", "[ab]c", "^é+$")
FORMATS = ("date", "time", "date-time", "uuid", "ipv4", "ipv6", "email", "hostname")
LITERALS: tuple[Any, ...] = (0, -3, 2.5, True, False, None, "", "a", 'say "hi"', "tab\there", "ünï", {"k": [1, None]}, [])


def make_schemas(count: int, seed: int, depth: int = 3) -> list[Schema]:
    """``count`` schemas, the same for the same seed; ``depth``: of nesting."""
    rng = random.Random(seed)
    return [make_schema(rng, depth) for _ in range(count)]


def make_schema(rng: random.Random, depth: int) -> Schema:
    """One schema, now and then with definitions that it refers to, once to itself."""
    schema = _any(rng, depth)
    if rng.random() < 0.2:
        tree = {
            "type": "object",
            "properties": {"v": _leaf(rng), "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/tree"}]}},
            "required": ["v", "next"],
            "additionalProperties": False,
        }
        parts = {"p": {"$ref": "#/$defs/part"}, "t": {"$ref": "#/$defs/tree"}}
        return {"$defs": {"part": schema, "tree": tree}, **_object(rng, 1, extra=parts)}
    return schema


def problem_with(schema: Schema, text: str) -> str | None:
    """Why ``text`` is no instance of ``schema``; None if it is one."""
    try:
        value = json.loads(text)
    except ValueError as error:
        return f"no JSON: {error}"
    first = next(iter(Draft202012Validator(schema).iter_errors(value)), None)
    return None if first is None else first.message


def _any(rng: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[], Schema]] = [lambda: _leaf(rng)]
    if depth:
        kinds += [
            lambda: _object(rng, depth - 1),
            lambda: _object(rng, depth - 1),
            lambda: _array(rng, depth - 1),
            lambda: {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]},
            lambda: _joined(rng),
            lambda: {"oneOf": [_integer(rng), _string(rng), {"type": "array", "items": _leaf(rng), "maxItems": 1}]},
        ]
    return rng.choice(kinds)()


def _joined(rng: random.Random) -> Schema:
    part = {**_object(rng, 0), "additionalProperties": True}
    return {"allOf": [part, {"type": "object", "properties": {"both": _leaf(rng)}, "required": ["both"]}]}


def _leaf(rng: random.Random) -> Schema:
    return rng.choice((_string, _number, _integer, _choice, lambda _: {"type": rng.choice(("boolean", "null"))}))(rng)


def _string(rng: random.Random) -> Schema:
    kind = rng.randrange(5)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(FORMATS)}
    if kind == 2:
        least = rng.randint(0, 4)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 6)}
    return {"type": "string", "maxLength": rng.randint(0, 12)}


def _number(rng: random.Random) -> Schema:
    low = rng.choice((-10, -1.5, 0, 0.25, 3))
    schema: Schema = {"type": "number", rng.choice(("minimum", "exclusiveMinimum")): low}
    if rng.random() < 0.7:
        schema[rng.choice(("maximum", "exclusiveMaximum"))] = low + rng.choice((0.5, 1, 7.25, 1000))
    return schema


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-200, 200)
    schema: Schema = {"type": "integer", "minimum": low, "maximum": low + rng.choice((2, 9, 10, 123))}
    if rng.random() < 0.3:
        return {"type": "integer", "multipleOf": rng.choice((2, 5, 7)), "minimum": 0, "maximum": 1000}
    return schema


def _choice(rng: random.Random) -> Schema:
    if rng.random() < 0.4:
        return {"const": rng.choice(LITERALS)}
    return {"enum": rng.sample(LITERALS, rng.randint(1, 4))}


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    schema: Schema = {"type": "array", "items": _any(rng, depth), "minItems": least, "maxItems": least + rng.randint(0, 2)}
    if rng.random() < 0.25:
        schema["prefixItems"] = [_leaf(rng) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.1:
        schema["uniqueItems"] = False
    return schema


def _object(rng: random.Random, depth: int, extra: Schema | None = None) -> Schema:
    names = rng.sample(NAMES, rng.randint(0 if extra else 1, 3))
    properties = {name: _any(rng, depth) for name in names} | (extra or {})
    schema: Schema = {"type": "object", "properties": properties}
    required = [name for name in properties if rng.random() < 0.6]
    if required:
        schema["required"] = required
    schema["additionalProperties"] = rng.choice((False, False, {"type": "integer"}, True)) if depth else False
    if rng.random() < 0.1:
        schema["patternProperties"] = {"^z[0-9]$": _leaf(rng)}
    if rng.random() < 0.1:
        schema["maxProperties" if not properties.keys() - set(required) else "minProperties"] = len(required) + 1
    return schema
