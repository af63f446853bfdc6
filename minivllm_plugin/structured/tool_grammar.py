"""The grammar of an answer that must be tool calls: what ``tool_choice`` ``required`` and a named function ask for.

The answer is then in the model's own format, with arguments that its tools' schemas allow, and nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.structured.json_schema import bounded_schema
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
    most = MAX_PARALLEL_CALLS if parallel and only is None else 1
    if tool_format == "json":
        more = f' | "[" call (", " call){{0,{most - 1}}} "]"' if most > 1 else ""
        rules, before, after = [f"start: call{more}"], '{{"name": {}, "parameters": ', "}"
    elif tool_format == "hermes":
        more = f' ("\\n" call){{0,{most - 1}}}' if most > 1 else ""
        rules, before, after = [f"start: call{more}"], '<tool_call>\n{{"name": {}, "arguments": ', "}\n</tool_call>"
    else:
        raise UnsupportedFeatureError(
            f"tool calls in the format {tool_format!r} cannot be forced; use tool_choice='auto', or the formats hermes or json"
        )
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, function in enumerate(functions):
        # The schema stands alone, so that its references ("#/$defs/…") still lead to its own root.
        opening = json.dumps(before.format(json.dumps(function["name"])))
        rules.append(f"call_{number}: {opening} arguments_{number} {json.dumps(after)}")
        rules.append(f"arguments_{number}: %json {json.dumps(_arguments_schema(function))}")
    return StructuredOutputsParams(grammar="%llguidance {}\n" + "\n".join(rules) + "\n")


def _arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise InvalidRequestError(f"parameters of tool {function['name']!r} must be a JSON schema, got {parameters!r:.100}")
    if not parameters:
        return bounded_schema({"type": "object", "properties": {}, "additionalProperties": False})
    kinds = parameters.get("type", "object")
    if "object" not in ([kinds] if isinstance(kinds, str) else kinds):
        raise InvalidRequestError(
            f"parameters of tool {function['name']!r} have type {kinds!r}; arguments are an object: its type must be 'object'"
        )
    return bounded_schema({**parameters, "type": "object"})
