"""The checks behind :class:`minivllm_plugin.sampling_parameters.SamplingParams`, each naming field, value and allowed range."""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from minivllm_plugin.errors import InvalidRequestError

__all__ = [
    "allowed_token_ids",
    "bad_words",
    "count_or_flag",
    "extra_args",
    "integer",
    "logit_bias",
    "number",
    "stop_strings",
    "token_ids",
    "token_sequences",
]

MAX_STOP_STRINGS = 64
MAX_BAD_WORDS = 1024
MAX_BIAS = 100.0


def number(params: object, name: str, low: float, high: float, *, low_open: bool = False) -> None:
    value = getattr(params, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not _is_finite(value):
        raise InvalidRequestError(f"{name} must be a finite number, got {value!r}")
    if value < low or value > high or (low_open and value == low):
        opening = "(" if low_open else "["
        raise InvalidRequestError(f"{name}={value} is outside {opening}{low:g}, {high:g}]")
    object.__setattr__(params, name, float(value))  # tensors take no integer beyond 64 bits


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def integer(params: object, name: str, low: int, high: int | None, *, optional: bool = False) -> None:
    value = getattr(params, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer{' or None' if optional else ''}, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{name}={value} must be {bound}")


def stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    for value in strings:
        if not isinstance(value, str) or not value:
            raise InvalidRequestError(f"stop must hold non-empty strings, got {value!r}; leave it out to have no stop string")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop has {len(strings)} strings, at most {MAX_STOP_STRINGS} are allowed")
    return strings


def token_ids(name: str, ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, Iterable) or isinstance(ids, str):
        raise InvalidRequestError(f"{name} must be a list of token ids, got {ids!r}")
    values = tuple(ids)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidRequestError(f"{name} must hold token ids of at least 0, got {value!r}")
    return values


def extra_args(given: object) -> Mapping[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise InvalidRequestError(f"extra_args must be a dictionary with names as keys, got {given!r:.200}")
    return MappingProxyType({name: value for name, value in given.items() if value is not None}) or None


def logit_bias(given: object) -> Mapping[int, float] | None:
    """Token id (a number, or as JSON has it, its digits) -> what is added to its logit, cut to [-100, 100] as hosted APIs do."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidRequestError(f"logit_bias must be a dictionary of token id to bias, got {given!r:.100}")
    biases: dict[int, float] = {}
    for token, bias in given.items():
        is_number = isinstance(token, int) and not isinstance(token, bool)
        if not (is_number or (isinstance(token, str) and token.isascii() and token.isdigit())) or int(token) < 0:
            raise InvalidRequestError(f"logit_bias must have token ids of at least 0 as keys, got {token!r:.100}")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not _is_finite(bias):
            raise InvalidRequestError(f"logit_bias of token {token} must be a finite number, got {bias!r:.100}")
        biases[int(token)] = float(min(max(bias, -MAX_BIAS), MAX_BIAS))
    return MappingProxyType(biases) or None


def bad_words(given: object) -> tuple[str, ...]:
    """Words that must not be generated."""
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"bad_words must be a list of strings, got {given!r:.100}")
    words = tuple(given)
    for word in words:
        if not isinstance(word, str) or not word:
            raise InvalidRequestError(f"bad_words must hold non-empty strings, got {word!r:.100}")
    if len(words) > MAX_BAD_WORDS:
        raise InvalidRequestError(f"bad_words has {len(words)} entries, at most {MAX_BAD_WORDS} are allowed")
    return words


def token_sequences(name: str, given: object) -> tuple[tuple[int, ...], ...]:
    """A list of lists of token ids, none of them empty."""
    if given is None:
        return ()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"{name} must be a list of lists of token ids, got {given!r:.100}")
    sequences = tuple(token_ids(name, entry) for entry in given)
    if not all(sequences):
        raise InvalidRequestError(f"{name} must hold no empty list")
    return sequences


def allowed_token_ids(given: object) -> tuple[int, ...] | None:
    """The only tokens that may be generated; None for all."""
    if given is None:
        return None
    ids = token_ids("allowed_token_ids", given)
    if not ids:
        raise InvalidRequestError("allowed_token_ids is empty, so nothing could be generated; leave it out to allow all")
    return tuple(dict.fromkeys(ids))


def count_or_flag(params: object, name: str, most: int) -> None:
    """A number of logprobs: None, False (none), True (the chosen token's only) or 0 .. ``most``."""
    value = getattr(params, name)
    if isinstance(value, bool):
        object.__setattr__(params, name, 0 if value else None)
        return
    integer(params, name, 0, most, optional=True)
