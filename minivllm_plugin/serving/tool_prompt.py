"""Tools for models whose chat template has no place for them: described in the system message, calls and results as text.

The format is Hermes', which Qwen's templates use, too: a small model has seen it if it has seen any. Changes messages that
were checked before; no template, no tokenizer.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["describe_tools"]

INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def describe_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with the tools in a system message and every call and result in plain text.

    Args:
        messages: normalised: text contents, arguments as objects.
        tools: in OpenAI's form; may be empty when only the history has calls.
    """
    plain = [_as_text(message) for message in messages]
    if not tools:
        return plain
    introduction = INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{plain[0]['content']}\n\n{introduction}"}, *plain[1:]]
    return [{"role": "system", "content": introduction}, *plain]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message.get('content') or ''}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    blocks = [f"<tool_call>\n{json.dumps(_call(call), ensure_ascii=False)}\n</tool_call>" for call in calls]
    content = "\n".join([text] if (text := message.get("content")) else []) + ("\n" if message.get("content") else "")
    return {"role": message["role"], "content": content + "\n".join(blocks)}


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    return {"name": function.get("name"), "arguments": function.get("arguments") or {}}
