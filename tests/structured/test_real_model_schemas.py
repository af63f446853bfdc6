"""The real model under hundreds of schemas: every completion that ends by itself is an instance of its schema."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from json_schemas import make_schemas, problem_with

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import UnsupportedFeatureError
from minivllm_plugin.parsing.records import collect_calls
from minivllm_plugin.parsing.tools import HermesToolParser, JsonToolParser
from minivllm_plugin.structured import StructuredOutputsParams
from minivllm_plugin.structured.compiler import GrammarCompiler
from minivllm_plugin.structured.tool_grammar import tool_grammar

pytestmark = [pytest.mark.model, pytest.mark.slow]
NUM_SCHEMAS = 210
# A model of this size likes to fill strings: few tokens, and values that it cannot make long end by themselves.
MAX_TOKENS = 48
EXAMPLES = 'Schema: {"type": "integer"}\nJSON:3\nSchema: {"type": "object"}\nJSON:{"a":true,"b":[1,"x"]}\n'


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM("smollm2-135m", max_model_len=512, max_num_sequences=64) as llm:
        yield llm


def accepted(llm: LLM, count: int) -> list[tuple[dict[str, Any], StructuredOutputsParams]]:
    """``count`` generated schemas that are not refused by name; most are shallow, for a small model to come to an end."""
    compiler = GrammarCompiler(llm.tokenizer, llm.vocab_size)
    found = []
    for schema in make_schemas(count, 2024, depth=1) + make_schemas(count // 2, 2025, depth=2):
        form = StructuredOutputsParams(json=schema)
        try:
            compiler.compile(form)
        except UnsupportedFeatureError:
            continue
        found.append((schema, form))
    return found[:count]


def test_every_completion_that_stops_validates(llm: LLM) -> None:
    schemas = accepted(llm, NUM_SCHEMAS)
    assert len(schemas) == NUM_SCHEMAS
    assert llm.tokenizer is not None
    blank = [token for token in range(llm.vocab_size) if (text := llm.tokenizer.decode([token])) and not text.strip()]
    prompts, params = [], []
    for number, (schema, form) in enumerate(schemas):
        for temperature in (0.0, 1.0):
            prompts.append(f"{EXAMPLES}Schema: {json.dumps(schema)[:120]}\nJSON:")
            one = SamplingParams(structured_outputs=form, max_tokens=MAX_TOKENS, temperature=temperature, seed=number)
            params.append(one.replace(logit_bias=dict.fromkeys(blank, -8)))  # or it fills its budget with line breaks
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    assert {output.finish_reason for output in outputs} <= {"stop", "length"}
    stopped = [(number // 2, output.text) for number, output in enumerate(outputs) if output.finish_reason == "stop"]
    problems = [(text, problem_with(schemas[number][0], text)) for number, text in stopped]
    assert [entry for entry in problems if entry[1] is not None] == []
    num_schemas = len({number for number, _ in stopped})
    print(f"{len(stopped)} of {len(outputs)} completions ended by themselves, of {num_schemas} of {NUM_SCHEMAS} schemas")
    assert num_schemas >= 150
    assert len(stopped) > len(outputs) / 2


@pytest.mark.parametrize("tool_format", ["hermes", "json"])
def test_forced_tool_calls_parse_and_validate(llm: LLM, tool_format: str) -> None:
    weather = {
        "$defs": {"Unit": {"enum": ["celsius", "fahrenheit"]}},
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "unit": {"$ref": "#/$defs/Unit"}},
        "required": ["city", "unit"],
        "additionalProperties": False,
    }
    numbers = {"type": "array", "items": {"type": "integer"}, "maxItems": 3}
    add = {"properties": {"numbers": numbers}, "required": ["numbers"], "additionalProperties": False}
    schemas = {"get_weather": weather, "add": add}
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in schemas.items()]
    form = tool_grammar(tools, tool_format=tool_format)
    conversations = [[{"role": "user", "content": text}] for text in ("Weather in Paris in celsius?", "What is 3 + 4?")] * 4
    greedy = SamplingParams(structured_outputs=form, max_tokens=80, temperature=0.0)
    params = [greedy, greedy, *(greedy.replace(temperature=1.0, seed=seed) for seed in range(6))]
    num_stopped = 0
    for answer in llm.chat(conversations, params, use_tqdm=False):  # type: ignore[arg-type]
        output = answer.outputs[0]
        parser = HermesToolParser() if tool_format == "hermes" else JsonToolParser(list(schemas))
        first, last = parser.feed(output.text), parser.finish()
        if output.finish_reason != "stop":
            continue
        num_stopped += 1
        calls = collect_calls([*first.calls, *last.calls])
        assert calls
        assert not (first.text + last.text).strip()
        for call in calls:
            assert problem_with(schemas[call.name], call.arguments) is None
    assert num_stopped >= 4
