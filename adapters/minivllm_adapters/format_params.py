"""What a call asks of the form of its answer: JSON, a schema, a regular expression, choices, a grammar. Pure."""

from collections.abc import Mapping
from typing import Any

from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.structured import StructuredOutputsParams

__all__ = ["FORMATS", "wanted_format"]

# vLLM's older names beside OpenAI's ``response_format`` and vLLM's present ``structured_outputs``.
GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}
FORMATS = frozenset({"response_format", "structured_outputs", *GUIDED})


def wanted_format(wanted: Mapping[str, Any]) -> StructuredOutputsParams | None:
    """The one form that is asked for, or None.

    Raises:
        InvalidRequestError: two at once, or a malformed one.
        UnsupportedFeatureError: a ``response_format`` of another type.
    """
    found = {name: made for name in sorted(FORMATS & wanted.keys()) if (made := _read(name, wanted[name])) is not None}
    if len(found) > 1:
        raise InvalidRequestError(f"{' and '.join(found)} both set the form of the answer; give one")
    return next(iter(found.values()), None)


def _read(name: str, value: Any) -> StructuredOutputsParams | None:
    try:
        return _form(name, value)
    except InvalidRequestError as error:
        raise error if name in str(error) else type(error)(f"{name}: {error}") from error


def _form(name: str, value: Any) -> StructuredOutputsParams | None:
    if name == "response_format":
        return _response_format(value)
    if name in GUIDED:
        return StructuredOutputsParams(**{GUIDED[name]: value})
    if not isinstance(value, Mapping):
        raise InvalidRequestError(f"structured_outputs must be a dict such as {{'regex': '[0-9]+'}}, got {value!r:.100}")
    try:
        return StructuredOutputsParams(**value) if value else None
    except TypeError as error:
        raise InvalidRequestError(f"structured_outputs takes json, json_object, regex, choice, grammar: {error}") from error


def _response_format(value: Any) -> StructuredOutputsParams | None:
    if hasattr(value, "model_json_schema"):  # a pydantic class that came past LiteLLM's own conversion
        return StructuredOutputsParams(json=value)
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        schema = value.get("schema")  # llama.cpp's and some hosts' spelling
        return StructuredOutputsParams(json=schema) if schema else StructuredOutputsParams(json_object=True)
    if kind == "json_schema":
        holder = value.get("json_schema")
        schema = holder.get("schema") if isinstance(holder, Mapping) else None
        if schema is None:
            form = '{"type": "json_schema", "json_schema": {"name": …, "schema": {…}}}'
            raise InvalidRequestError(f"response_format must be {form}, got {value!r:.200}")
        return StructuredOutputsParams(json=schema)
    if isinstance(kind, str):
        raise UnsupportedFeatureError(f"response_format of type {kind!r} is not supported; use text, json_object or json_schema")
    raise InvalidRequestError(f"response_format must be a dict with a type, or a pydantic class, got {value!r:.100}")
