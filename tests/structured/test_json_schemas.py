"""What a compiled schema allows is what the schema says: random ways through generated schemas, checked with jsonschema."""

import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from json_schemas import make_schemas, problem_with

from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.structured import StructuredOutputsParams
from minivllm_plugin.structured.compiler import CompiledGrammar, GrammarCompiler
from minivllm_plugin.structured.json_schema import bounded_schema

Walk = Callable[[CompiledGrammar, random.Random], str | None]
Accepts = Callable[[CompiledGrammar, str], bool]


@pytest.fixture(scope="module")
def compiler(byte_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer, 300)


def compiled(compiler: GrammarCompiler, schema: Any) -> CompiledGrammar:
    return compiler.compile(StructuredOutputsParams(json=schema))


@pytest.mark.parametrize("seed", range(4))
def test_every_way_through_a_schema_ends_in_an_instance_of_it(compiler: GrammarCompiler, walk: Walk, seed: int) -> None:
    rng = random.Random(seed)
    num_refused = num_ended = 0
    for schema in make_schemas(75, seed):
        try:
            grammar = compiled(compiler, schema)
        except UnsupportedFeatureError:
            num_refused += 1
            continue
        for _ in range(4):
            text = walk(grammar, rng)
            if text is not None:
                num_ended += 1
                assert problem_with(schema, text) is None, (text, schema)
    assert num_refused < 8
    assert num_ended > 200


@pytest.mark.parametrize("high", [None, "maximum", "exclusiveMaximum"])
@pytest.mark.parametrize("low", [None, "minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("kind", ["number", "integer"])
def test_bounds_of_numbers_are_kept_to_the_digit(
    compiler: GrammarCompiler, accepts: Accepts, kind: str, low: str | None, high: str | None
) -> None:
    fractions = ("", ".0", ".5", ".25", ".49", ".51", ".05", ".000000001", ".999999999")
    numbers = [f"{sign}{whole}{part}" for sign in ("", "-") for whole in (0, 1, 2, 3, 10) for part in fractions]
    bounds = (-10, -1.5, -1, 0, 0.25, 0.5, 1, 3, 3.000000001)
    num_accepted = 0
    for least in bounds if low else (None,):
        for most in bounds if high else (None,):
            schema = {"type": kind} | ({low: least} if low else {}) | ({high: most} if high else {})
            try:
                grammar = compiled(compiler, schema)
            except InvalidRequestError:  # nothing lies between them
                assert not any(problem_with(schema, str(number)) is None for number in range(-20, 20))
                continue
            accepted = [number for number in numbers if accepts(grammar, number)]
            num_accepted += len(accepted)
            assert [number for number in accepted if problem_with(schema, number)] == [], schema
    assert num_accepted >= 10


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "string"}},
         ['{"a":1}', '{"b":"x"}', '{"é":"\\n"}'], ['{"\\u0061":"x"}', '{"a":"x"}', '{"a":1,"a":"x"}']),
        ({"type": "object", "properties": {"ab": {"type": "string"}}, "patternProperties": {"^z": {"type": "integer"}}},
         ['{"ab":"x"}', '{"z":1}'], ['{"z":"x"}', '{"\\u007a":"x"}']),
        ({"type": "string", "minLength": 2, "maxLength": 3},
         ['"ab"', '"éé"', '"😀😀"', '"\\n\\n"'], ['"a"', '"\\n"', '"😀"', '"abcd"']),
        ({"type": "string", "pattern": "^a.b$"}, ['"axb"', '"aéb"', '"a\\"b"'], ['"a\\nb"', '"ab"']),
        ({"type": "string", "pattern": "^a\\x01b$"}, ['"a\\u0001b"'], ['"ab"']),
        ({"const": "a\u0001b"}, ['"a\\u0001b"'], ['"ab"']),
        ({"enum": ["a", {"b": 1}]}, ['"a"', '{"b":1}', '{"b" : 1}'], ['{"b":2}', '{"b":1,"b":2}', "1"]),
        ({"enum": [1, 5], "minimum": 3}, ["5"], ["1"]),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": False}, ["[1,1]", "[]"], ["[null]"]),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, ["[1]", "[]"], ["[1,2]", '["a"]']),
        ({"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}], "type": "array"},
         ["[1]", '[1,"x"]'], ['["x"]']),
        ({"$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}, "additionalProperties": False}},
          "$ref": "#/$defs/n"}, ["{}", '{"c":{"c":{}}}'], ['{"c":1}', '{"d":{}}']),
        ({"type": ["string", "null", "integer"], "minimum": 3, "maxLength": 1}, ["null", "3", '"a"'], ["2", '"ab"', "true"]),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["null", "1.5"]),
        ({"type": "object", "properties": {"exclusiveMinimum": {"const": {"exclusiveMinimum": 3, "maximum": 3.5}}},
          "additionalProperties": False}, ['{"exclusiveMinimum":{"exclusiveMinimum":3,"maximum":3.5}}'], ['{"minimum":1}']),
        (True, ["1", '"a"', "[{}]"], ["nul", ""]),
        ({"type": "object"}, ["{}", "{" + " " * 16 + "}"], ["{" + " " * 17 + "}", "{} ", " {}", "[]"]),
    ],
)  # fmt: skip
def test_single_keywords(compiler: GrammarCompiler, accepts: Accepts, schema: Any, right: list[str], wrong: list[str]) -> None:
    grammar = compiled(compiler, schema)
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    "schema",
    [
        {"not": {"type": "integer"}},
        {"type": "array", "uniqueItems": True},
        {"type": "array", "contains": {"type": "integer"}},
        {"type": "object", "propertyNames": {"pattern": "^a"}},
        {"type": "object", "minProperties": 2},
        {"type": "object", "unevaluatedProperties": False},
        {"type": "object", "dependentRequired": {"a": ["b"]}},
        {"if": {"type": "integer"}, "then": {"minimum": 3}},
        {"type": "number", "multipleOf": 0.1},
        {"type": "string", "format": "regex"},
        {"type": "string", "pattern": "(?=a)b"},
        {"type": "string", "pattern": r"^(a)\1$"},
        {"type": "string", "pattern": "^[[a]]$"},
        {"type": "string", "pattern": "^[a-z&&b]$"},
        {"type": "object", "patternProperties": {"^[a--b]": {}}},
        {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        {"properties": {"deep": {"items": {"anyOf": [{"type": "array", "uniqueItems": True}]}}}},
    ],
)
def test_what_cannot_be_enforced_is_refused_by_its_name(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(UnsupportedFeatureError) as caught:
        compiled(compiler, schema)
    assert (
        "cannot be enforced" in str(caught.value) or "in different ways" in str(caught.value) or "disagree" in str(caught.value)
    )


@pytest.mark.parametrize(
    "schema",
    [
        False,
        {"type": "strng"},
        {"$ref": "#/$defs/none"},
        {"$ref": "https://example.com/schema.json"},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "string", "minLength": 5, "maxLength": 3},
        {"type": "object", "required": ["z"], "additionalProperties": False},
        {"type": "string", "pattern": "("},
        {"type": "object", "properties": [1]},
        {"type": "integer", "minimum": -(10**30), "maximum": 10**30},
    ],
)
def test_what_is_wrong_or_contradicts_itself_is_refused(compiler: GrammarCompiler, schema: Any) -> None:
    with pytest.raises(InvalidRequestError):
        compiled(compiler, schema)


def test_a_schema_nested_beyond_reason_is_refused(compiler: GrammarCompiler) -> None:
    for depth in (150, 400):
        schema: dict[str, Any] = {"type": "integer"}
        for _ in range(depth):
            schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        with pytest.raises(InvalidRequestError):
            compiled(compiler, schema)


@pytest.mark.parametrize("pattern", [r"^[\[a]$", "^[^]a]$", "^[]a]$", r"^\[&&$", "^(a|b)--$", r"[a\]&]"])
def test_ordinary_square_brackets_are_no_operators(pattern: str) -> None:
    assert bounded_schema({"type": "string", "pattern": pattern})["pattern"] == pattern


def test_the_given_schema_is_left_as_it_is() -> None:
    schema = {"anyOf": [{"type": "number", "exclusiveMinimum": 0, "maximum": 1}], "uniqueItems": False}
    before = json.dumps(schema)
    bounded = bounded_schema(schema)
    assert json.dumps(schema) == before
    assert bounded["anyOf"][0]["minimum"] == pytest.approx(1e-9)
    assert "uniqueItems" not in bounded


@pytest.mark.parametrize(
    "schema",
    [
        {"exclusiveMinimum": math.inf},
        {"exclusiveMaximum": 10**400},
        {"multipleOf": 10**400},
        {"minProperties": math.nan},
        {"enum": [{1, 2}]},
        {"enum": [b"bytes"]},
    ],
)
def test_what_is_no_json_is_refused_by_type(schema: dict[str, Any]) -> None:
    """Tools bring their schemas as they are, past the checks of StructuredOutputsParams."""
    with pytest.raises(InvalidRequestError, match="no JSON"):
        bounded_schema(schema)


@pytest.mark.parametrize(
    "schema",
    [
        {"required": 3, "minProperties": 1},
        {"required": "a"},
        {"patternProperties": [1]},
        {"anyOf": {"type": "integer"}},
        {"items": 3},
        {"properties": {"a": 3}},
        {"type": "string", "pattern": 3},
        {"multipleOf": "x"},
        {"minimum": "x"},
    ],
)
def test_malformed_schemas_raise_nothing_else(compiler: GrammarCompiler, schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        compiled(compiler, schema)
