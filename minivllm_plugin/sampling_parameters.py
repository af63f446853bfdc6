"""What a caller may ask of one request's decoding. Frozen and validated on construction; knows no model.

Names, defaults and meanings are vLLM's ``SamplingParams`` where both have the field. Bounds that need the model
(vocabulary, context window) are checked at admission by :mod:`minivllm_plugin.engine.admission`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from minivllm_plugin.errors import InvalidRequestError

__all__ = ["SamplingParams"]

MAX_STOP_STRINGS = 64
MAX_SEED = 2**64 - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How to choose the tokens of one request, and when to end it.

    Attributes:
        temperature: 0 picks the most likely token (greedy). Else logits are divided by it. Range [0, inf).
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p. Range (0, 1].
        min_p: drop tokens less likely than ``min_p * max probability``. Range [0, 1].
        seed: the same seed gives the same tokens, whatever runs beside the request. None draws a fresh one.
        max_tokens: upper bound of completion tokens; None means until the context window is full.
        min_tokens: no end token, stop token or stop string is honoured before this many completion tokens.
        stop: text ends before the earliest match of any of these strings (at most 64, none empty).
        stop_token_ids: further token ids that end the completion; the token is kept in ``token_ids``, not in the text.
        ignore_eos: the model's own end tokens do not end the completion.
        include_stop_str_in_output: keep the matched stop string (or the text of the stop token) in the text.
        skip_special_tokens: leave control tokens out of the text.
        max_model_length: the sequence ends when prompt + completion reach this many tokens (seed's third condition).
        extra_args: for plugins: name of a logits processor or stop criterion -> the value it is given. Read-only afterwards; a
            name with the value None is left out. Which names there are is checked when the request is submitted.

    Raises:
        InvalidRequestError: naming field, value and allowed range; or an unknown field and the known ones.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] | str | Sequence[str] | None = ()
    stop_token_ids: tuple[int, ...] | Sequence[int] | None = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    max_model_length: int | None = None
    extra_args: Mapping[str, Any] | None = field(default=None, hash=False)  # its values may be anything

    def __new__(cls, *_: object, **given: object) -> "SamplingParams":
        """Refuse unknown names with our own error; the dataclass would raise a bare TypeError without a remedy."""
        _check_names(given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        _number(self, "temperature", 0.0, math.inf)
        _integer(self, "top_k", -1, None)
        _number(self, "top_p", 0.0, 1.0, low_open=True)
        _number(self, "min_p", 0.0, 1.0)
        _integer(self, "seed", 0, MAX_SEED, optional=True)
        _integer(self, "max_tokens", 1, None, optional=True)
        _integer(self, "min_tokens", 0, None)
        _integer(self, "max_model_length", 1, None, optional=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is greater than max_tokens={self.max_tokens}; lower min_tokens or raise max_tokens"
            )
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        object.__setattr__(self, "extra_args", _extra_args(self.extra_args))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled by its fields: a read-only mapping is neither by itself."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return _rebuild, ({**values, "extra_args": None if self.extra_args is None else dict(self.extra_args)},)

    @property
    def greedy(self) -> bool:
        """True when no random number is drawn."""
        return self.temperature == 0.0

    def replace(self, **changes: object) -> "SamplingParams":
        """A validated copy with some fields changed."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return SamplingParams(**{**values, **changes})


def _rebuild(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


def _check_names(given: Iterable[str]) -> None:
    known = {f.name for f in fields(SamplingParams)}
    unknown = sorted(set(given) - known)
    if unknown:
        raise InvalidRequestError(f"unknown sampling parameter {unknown[0]!r}; known are {', '.join(sorted(known))}")


def _number(params: SamplingParams, name: str, low: float, high: float, *, low_open: bool = False) -> None:
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


def _integer(params: SamplingParams, name: str, low: int, high: int | None, *, optional: bool = False) -> None:
    value = getattr(params, name)
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer{' or None' if optional else ''}, got {value!r}")
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"between {low} and {high}"
        raise InvalidRequestError(f"{name}={value} must be {bound}")


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else (stop,)
    for value in strings:
        if not isinstance(value, str) or not value:
            raise InvalidRequestError(f"stop must hold non-empty strings, got {value!r}; leave it out to have no stop string")
    if len(strings) > MAX_STOP_STRINGS:
        raise InvalidRequestError(f"stop has {len(strings)} strings, at most {MAX_STOP_STRINGS} are allowed")
    return strings


def _token_ids(ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, Iterable) or isinstance(ids, str):
        raise InvalidRequestError(f"stop_token_ids must be a list of token ids, got {ids!r}")
    values = tuple(ids)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidRequestError(f"stop_token_ids must hold token ids of at least 0, got {value!r}")
    return values


def _extra_args(given: object) -> Mapping[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping) or not all(isinstance(name, str) and name for name in given):
        raise InvalidRequestError(f"extra_args must be a dictionary with names as keys, got {given!r:.200}")
    return MappingProxyType({name: value for name, value in given.items() if value is not None}) or None
