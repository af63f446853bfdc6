"""Reads one parameter's value and refuses it by name if it is of the wrong kind. Pure; used by the other parameter modules."""

from collections.abc import Mapping
from typing import Any

from minivllm_plugin.errors import InvalidRequestError

__all__ = ["flag", "integer", "mapping", "shortened", "text"]


def integer(wanted: Mapping[str, Any], name: str, default: int) -> int:
    """A whole number; True and False are none."""
    value = wanted.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {shortened(value)}")
    return value


def flag(wanted: Mapping[str, Any], name: str, default: bool) -> bool:
    """True or False; 0 and 1 are neither."""
    value = wanted.get(name, default)
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} must be True or False, got {shortened(value)}")
    return value


def text(wanted: Mapping[str, Any], name: str) -> str | None:
    """A string that is not empty, or None when it is not given."""
    value = wanted.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidRequestError(f"{name} must be a non-empty string, got {shortened(value)}")
    return value


def mapping(wanted: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """A dictionary, or None when it is not given."""
    value = wanted.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} must be a dict, got {shortened(value)}")
    return value


def shortened(value: object) -> str:
    """``repr`` for an error message: at most 80 characters."""
    whole = repr(value)
    return whole if len(whole) <= 80 else f"{whole[:77]}..."
