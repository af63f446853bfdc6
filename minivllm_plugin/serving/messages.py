"""Chat messages as callers write them become plain dicts that a chat template can read.

Accepts what the OpenAI API accepts (and objects with ``model_dump()`` or ``dict()``, such as LiteLLM's); refuses the rest
with the message's index and the value. Knows nothing about tokenizers. The caller's objects are never changed.
"""

import json
from collections.abc import Mapping
from typing import Any

from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError

__all__ = ["normalize_messages", "normalize_tools", "plain_data"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
MEDIA_WORDS = ("image", "audio", "video", "file")
MAX_DEPTH = 100  # of nested lists and objects


def normalize_messages(messages: object, template: str) -> list[dict[str, Any]]:
    """Validate and simplify a conversation.

    Text parts are joined by newlines; ``developer`` becomes ``system`` and ``function`` becomes ``tool`` (templates rarely
    know them); tool-call arguments given as JSON text become objects; keys whose value is None are left out.

    Args:
        messages: list of messages.
        template: the chat template; roles that it names itself are accepted too.

    Raises:
        InvalidRequestError: not a list, empty, or a message that is malformed (index and value are named).
        UnsupportedFeatureError: an image, audio, video or file part.
    """
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, (list, tuple)):
        raise InvalidRequestError(f"messages must be a list of messages, got {type(messages).__name__}: {messages!r:.100}")
    if not messages:
        raise InvalidRequestError("messages is empty; give at least one message")
    return [_message(message, f"messages[{index}]", template) for index, message in enumerate(messages)]


def normalize_tools(tools: object) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's form, ``{"type": "function", "function": {"name": …}}``; None when there are none."""
    if tools is None:
        return None
    if not isinstance(tools, (list, tuple)):
        raise InvalidRequestError(f"tools must be a list, got {type(tools).__name__}: {tools!r:.100}")
    plain = []
    for index, tool in enumerate(tools):
        data = plain_data(tool, f"tools[{index}]")
        function = data.get("function") if isinstance(data, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f'tools[{index}] must be {{"type": "function", "function": {{"name": …}}}}, got {tool!r:.200}'
            )
        plain.append(data)
    return plain or None


def plain_data(value: object, where: str, depth: int = 0) -> Any:
    """A copy made of JSON types only: a template must not reach methods of a caller's objects."""
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"{where} is nested more than {MAX_DEPTH} levels deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # enums and other subclasses: only their text
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, Mapping):
        return {_key(key, where): plain_data(item, f"{where}[{key!r:.50}]", depth + 1) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item, f"{where}[{index}]", depth + 1) for index, item in enumerate(value)]
    for method in ("model_dump", "dict"):
        if callable(dump := getattr(value, method, None)) and not isinstance(value, type):
            return plain_data(dump(), where, depth + 1)
    raise InvalidRequestError(f"{where} is a {type(value).__name__}; only text, numbers, lists and objects are allowed")


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise InvalidRequestError(f"{where} has the key {key!r}; keys must be strings")
    return str.__str__(key)


def _message(value: object, where: str, template: str) -> dict[str, Any]:
    message = None if isinstance(value, (str, list, tuple)) else plain_data(value, where)
    if not isinstance(message, dict):
        raise InvalidRequestError(f'{where} must be a message such as {{"role": "user", "content": "…"}}, got {value!r:.100}')
    message = {key: item for key, item in message.items() if item is not None}
    message["role"] = _role(message.get("role"), where, template)
    if "function_call" in message and "tool_calls" not in message:  # the API of 2023
        message["tool_calls"] = [{"type": "function", "function": message.pop("function_call")}]
    if "tool_calls" in message:
        message["tool_calls"] = _tool_calls(message["tool_calls"], f"{where}['tool_calls']")
        if not message["tool_calls"]:
            del message["tool_calls"]
    message["content"] = _content(message, where)
    return message


def _role(role: object, where: str, template: str) -> str:
    if role is None:
        raise InvalidRequestError(f"{where} has no role; give one of {', '.join(ROLES)}")
    if not isinstance(role, str) or not (role in ROLES or _names(template, role)):
        raise InvalidRequestError(f"{where} has the role {role!r:.100}; the chat template knows {', '.join(ROLES)}")
    if role == "developer" and not _names(template, role):
        return "system"
    return "tool" if role == "function" else role


def _names(template: str, role: str) -> bool:
    return role.isidentifier() and (f"'{role}'" in template or f'"{role}"' in template)


def _content(message: Mapping[str, Any], where: str) -> str:
    """The text of a message; an assistant that only called tools (or only reasoned or refused) may have none."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(_part(part, f"{where}['content'][{index}]") for index, part in enumerate(content))
    if content is not None:
        raise InvalidRequestError(f"{where}['content'] must be text or a list of text parts, got {content!r:.100}")
    if message["role"] == "assistant":
        if isinstance(refusal := message.get("refusal"), str):
            return refusal
        if "tool_calls" in message or "reasoning_content" in message or "reasoning" in message:
            return ""  # missing or None would break templates that concatenate it
    raise InvalidRequestError(f"{where} ({message['role']}) has no content; only an assistant with tool_calls may leave it out")


def _part(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequestError(f'{where} must be a part such as {{"type": "text", "text": "…"}}, got {part!r:.100}')
    if kind in TEXT_PARTS:
        text = part.get(TEXT_PARTS[kind])
        if not isinstance(text, str):
            raise InvalidRequestError(f"{where} is a {kind} part whose text is {text!r:.100}; it must be a string")
        return text
    if any(word in kind for word in MEDIA_WORDS):
        raise UnsupportedFeatureError(f"{where} is of type {kind!r}; this engine reads text only: send text parts")
    raise InvalidRequestError(f"{where} has the unknown type {kind!r:.50}; use {', '.join(TEXT_PARTS)}")


def _tool_calls(calls: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{where} must be a list, got {calls!r:.100}")
    result = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(
                f'{where}[{index}] must be {{"function": {{"name": …, "arguments": …}}}}, got {call!r:.100}'
            )
        arguments = _arguments(function.get("arguments"), f"{where}[{index}]")
        result.append({**call, "function": {**function, "arguments": arguments}})
    return result


def _arguments(arguments: object, where: str) -> dict[str, Any]:
    """Templates expect an object; the OpenAI API carries it as JSON text."""
    if isinstance(arguments, str):
        try:
            arguments = plain_data(json.loads(arguments), where) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            if isinstance(error, InvalidRequestError):
                raise
            raise InvalidRequestError(f"{where} has arguments that are not JSON ({error}): {arguments!r:.200}") from error
    if arguments is None:
        return {}
    if not isinstance(arguments, dict):
        raise InvalidRequestError(f"{where} has arguments that are no JSON object: {arguments!r:.200}")
    return arguments
