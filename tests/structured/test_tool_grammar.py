"""Forced tool calls: whatever the grammar allows, the parser takes apart into calls that the tools' schemas accept."""

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from json_schemas import make_schemas, problem_with

from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.parsing.records import ToolCall, ToolParser, collect_calls
from minivllm_plugin.parsing.tools import HermesToolParser, JsonToolParser
from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.structured.compiler import CompiledGrammar, GrammarCompiler
from minivllm_plugin.structured.tool_grammar import MAX_PARALLEL_CALLS, tool_grammar

Walk = Callable[[CompiledGrammar, random.Random], str | None]
CITY = {"enum": ["Paris", "Rome"]}
PARAMETERS: dict[str, Any] = {
    "get_weather": {  # what pydantic makes of nested models: definitions at the root, and references to them
        "$defs": {"City": CITY},
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city"],
        "additionalProperties": False,
    },
    'say "hi"': {"properties": {"text": {"type": "string", "maxLength": 5}}, "required": ["text"]},
    "now": None,
    "now_too": {},
}


def tools(parameters: dict[str, Any] = PARAMETERS) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in parameters.items()]


def parse(tool_format: str, text: str, names: list[str]) -> tuple[str, list[ToolCall]]:
    parser: ToolParser = HermesToolParser() if tool_format == "hermes" else JsonToolParser(names)
    first, last = parser.feed(text), parser.finish()
    return first.text + last.text, collect_calls([*first.calls, *last.calls])


@pytest.fixture(scope="module")
def compiler(byte_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer, 300)


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
@pytest.mark.parametrize("options", [{}, {"parallel": False}, {"only": "get_weather"}, {"only": 'say "hi"'}])
def test_all_that_is_allowed_is_calls(compiler: GrammarCompiler, walk: Walk, tool_format: str, options: dict[str, Any]) -> None:
    compiled = compiler.compile(tool_grammar(tools(), tool_format=tool_format, **options))
    counts = set()
    for seed in range(40):
        text = walk(compiled, random.Random(seed))
        if text is None:
            continue
        rest, calls = parse(tool_format, text, list(PARAMETERS))
        assert not rest.strip(), text
        assert 1 <= len(calls) <= (1 if options else MAX_PARALLEL_CALLS)
        counts.add(len(calls))
        for call in calls:
            assert options.get("only", call.name) == call.name
            assert isinstance(json.loads(call.arguments), dict)
            assert problem_with(PARAMETERS[call.name] or {"maxProperties": 0}, call.arguments) is None
    assert counts == {1} if options else len(counts) > 1


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
def test_generated_schemas_as_parameters(compiler: GrammarCompiler, walk: Walk, tool_format: str) -> None:
    objects = [schema for schema in make_schemas(200, 21) if schema.get("type") == "object"]
    assert len(objects) > 30
    num_calls = 0
    for number, schema in enumerate(objects):
        asked = tools({"f": schema, "g": {"type": "object", "enum": [{}]}})
        try:
            compiled = compiler.compile(tool_grammar(asked, tool_format=tool_format))
        except UnsupportedFeatureError:
            continue
        text = walk(compiled, random.Random(number))
        if text is None:
            continue
        for call in parse(tool_format, text, ["f", "g"])[1]:
            num_calls += 1
            assert problem_with(schema if call.name == "f" else {"enum": [{}]}, call.arguments) is None, (schema, text)
    assert num_calls > 30


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"tools": []}, InvalidRequestError, "none"),
        ({"only": "missing"}, InvalidRequestError, "get_weather"),
        ({"tool_format": "pythonic"}, UnsupportedFeatureError, "hermes or json"),
        ({"tools": tools({"f": [1]})}, InvalidRequestError, "JSON schema"),
        ({"tools": tools({"f": {"type": "string"}})}, InvalidRequestError, "must be 'object'"),
        ({"tools": tools({"f": {"type": "object", "minProperties": 7}})}, UnsupportedFeatureError, "minProperties"),
    ],
)
def test_what_cannot_be_forced_is_refused(options: dict[str, Any], error: type[Exception], words: str) -> None:
    asked = {"tools": tools(), "tool_format": "hermes", **options}
    with pytest.raises(error, match=words):
        tool_grammar(asked.pop("tools"), **asked)


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
def test_keywords_beyond_the_library_are_named(compiler: GrammarCompiler, tool_format: str) -> None:
    asked = tools({"f": {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}})
    with pytest.raises(UnsupportedFeatureError, match="uniqueItems"):
        compiler.compile(tool_grammar(asked, tool_format=tool_format))


def test_white_space_between_arguments_is_bounded(compiler: GrammarCompiler, accepts: Callable[..., bool]) -> None:
    compiled = compiler.compile(tool_grammar(tools(), tool_format="json", only="get_weather"))
    call = '{"name": "get_weather", "parameters": {%s"city":"Paris"}}'
    assert accepts(compiled, call % (" " * 16))
    assert not accepts(compiled, call % (" " * 17))
