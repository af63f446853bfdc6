"""The grammar of an answer that must be tool calls: what ``tool_choice`` ``required`` and a named function ask for.

The answer is then in the model's own format, with arguments that its tools' schemas allow, and nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.structured.params import StructuredOutputsParams

__all__ = ["tool_grammar"]

MAX_PARALLEL_CALLS = 8


def tool_grammar(
    tools: Sequence[Mapping[str, Any]], *, tool_format: str, only: str | None = None, parallel: bool = True
) -> StructuredOutputsParams:
    """The form of an answer that calls ``tools``.

    Args:
        tools: in OpenAI's form.
        tool_format: ``hermes`` or ``json``.
        only: the one function that must be called; then exactly one call is made.
        parallel: several calls are allowed.

    Raises:
        InvalidRequestError: there are no tools, or none of that name.
        UnsupportedFeatureError: calls in another format cannot be forced.
    """
    functions = [tool["function"] for tool in tools if only is None or tool["function"]["name"] == only]
    if not functions:
        known = ", ".join(tool["function"]["name"] for tool in tools) or "none"
        asked = "tool_choice='required'" if only is None else f"tool_choice names {only!r}"
        raise InvalidRequestError(f"{asked}, but the tools are: {known}")
    key = "parameters" if tool_format == "json" else "arguments"
    call = {"anyOf": [_call_schema(function, key) for function in functions]}
    most = MAX_PARALLEL_CALLS if parallel and only is None else 1
    if tool_format == "json":
        if most == 1:
            return StructuredOutputsParams(json=call)
        return StructuredOutputsParams(json={"type": "array", "items": call, "minItems": 1, "maxItems": most})
    if tool_format != "hermes":
        raise UnsupportedFeatureError(
            f"tool calls in the format {tool_format!r} cannot be forced; use tool_choice='auto', or the formats hermes or json"
        )
    more = f' ("\\n" call){{0,{most - 1}}}' if most > 1 else ""
    lark = (
        "%llguidance {}\n"
        f"start: call{more}\n"
        'call: "<tool_call>\\n" object "\\n</tool_call>"\n'
        f"object: %json {json.dumps(call)}\n"
    )
    return StructuredOutputsParams(grammar=lark)


def _call_schema(function: Mapping[str, Any], key: str) -> dict[str, Any]:
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequestError(f"parameters of tool {function['name']!r} must be a JSON schema, got {parameters!r:.100}")
    schema = dict(parameters) if parameters else {"type": "object", "properties": {}, "additionalProperties": False}
    return {
        "type": "object",
        "properties": {"name": {"const": function["name"]}, key: schema},
        "required": ["name", key],
        "additionalProperties": False,
    }
