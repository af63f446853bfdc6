"""What a caller may ask of one request's decoding. Frozen and validated on construction; knows no model.

Names, defaults and meanings are vLLM's ``SamplingParams`` where both have the field. Bounds that need the model
(vocabulary, context window) are checked at admission by :mod:`minivllm_plugin.engine.admission`.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from minivllm_plugin import parameter_checks as checks
from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.structured.params import StructuredOutputsParams

__all__ = ["SamplingParams"]

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20  # vLLM's default, and the limit of hosted APIs
MAX_COMPLETIONS = 128


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
        presence_penalty: subtracted from the logit of every token that the completion has. Range [-2, 2].
        frequency_penalty: subtracted once for each time that the completion has it. Range [-2, 2].
        repetition_penalty: positive logits of tokens in prompt or completion are divided by it, negative ones multiplied
            (CTRL paper). Range (0, inf); 1 changes nothing.
        logit_bias: token id -> number added to its logit, cut to [-100, 100].
        bad_words: strings that are not generated, alone or after a space.
        bad_words_token_ids: the same as token ids: no completion contains one of these runs. Filled from ``bad_words`` when the
            request is submitted.
        allowed_token_ids: only these are generated, and the end tokens only if they are among them.
        logprobs: so many of the most likely tokens are reported at each place, the chosen one always, with the log-softmax of
            the logits before anything is done to them. 0 or True reports the chosen one alone. Range 0 .. 20.
        prompt_logprobs: the same for each token of the prompt but the first. The prompt is then computed whole.
        n: so many completions of one prompt. Range 1 .. 128.
        structured_outputs: the completion has this form; see :class:`~minivllm_plugin.structured.StructuredOutputsParams`. It
            ends right after its value, whatever ``min_tokens`` and ``ignore_eos`` say.
        thinking_token_budget: after so many tokens of reasoning the closing tag is put in, and the answer begins. None: no limit.
            Only for models that reason between ``<think>`` tags.
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
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    bad_words: tuple[str, ...] | Sequence[str] | None = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | Sequence[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    extra_args: Mapping[str, Any] | None = field(default=None, hash=False)  # its values may be anything
    adjusts_logits: bool = field(init=False, repr=False, compare=False, default=False)

    def __new__(cls, *_: object, **given: object) -> "SamplingParams":
        """Refuse unknown names with our own error; the dataclass would raise a bare TypeError without a remedy."""
        _check_names(given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        checks.number(self, "temperature", 0.0, math.inf)
        checks.integer(self, "top_k", -1, None)
        checks.number(self, "top_p", 0.0, 1.0, low_open=True)
        checks.number(self, "min_p", 0.0, 1.0)
        checks.integer(self, "seed", 0, MAX_SEED, optional=True)
        checks.integer(self, "max_tokens", 1, None, optional=True)
        checks.integer(self, "min_tokens", 0, None)
        checks.integer(self, "max_model_length", 1, None, optional=True)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens={self.min_tokens} is greater than max_tokens={self.max_tokens}; lower min_tokens or raise max_tokens"
            )
        checks.number(self, "presence_penalty", -2.0, 2.0)
        checks.number(self, "frequency_penalty", -2.0, 2.0)
        checks.number(self, "repetition_penalty", 0.0, math.inf, low_open=True)
        checks.integer(self, "n", 1, MAX_COMPLETIONS)
        checks.integer(self, "thinking_token_budget", 0, None, optional=True)
        checks.count_or_flag(self, "logprobs", MAX_LOGPROBS)
        checks.count_or_flag(self, "prompt_logprobs", MAX_LOGPROBS)
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            raise InvalidRequestError(
                f"structured_outputs must be StructuredOutputsParams(json=…, regex=…, choice=… or grammar=…), "
                f"got {self.structured_outputs!r:.100}"
            )
        for name, value in (
            ("stop", checks.stop_strings(self.stop)),
            ("stop_token_ids", checks.token_ids("stop_token_ids", self.stop_token_ids)),
            ("logit_bias", checks.logit_bias(self.logit_bias)),
            ("bad_words", checks.bad_words(self.bad_words)),
            ("bad_words_token_ids", checks.token_sequences("bad_words_token_ids", self.bad_words_token_ids)),
            ("allowed_token_ids", checks.allowed_token_ids(self.allowed_token_ids)),
            ("extra_args", checks.extra_args(self.extra_args)),
        ):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "adjusts_logits", self._has_adjustments())

    def __reduce__(self) -> tuple[Any, ...]:
        """Copied and pickled by its fields: a read-only mapping is neither by itself."""
        values = self._values()
        for name in ("extra_args", "logit_bias"):
            values[name] = None if values[name] is None else dict(values[name])
        return _rebuild, (values,)

    @property
    def greedy(self) -> bool:
        """True when no random number is drawn."""
        return self.temperature == 0.0

    def replace(self, **changes: object) -> "SamplingParams":
        """A validated copy with some fields changed."""
        return SamplingParams(**{**self._values(), **changes})

    @property
    def has_penalties(self) -> bool:
        """Whether tokens that were there before count."""
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    def _has_adjustments(self) -> bool:
        wanted = (self.logit_bias, self.bad_words_token_ids, self.allowed_token_ids, self.min_tokens, self.has_penalties)
        return any(wanted)

    def _values(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}


def _rebuild(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values)


def _check_names(given: Iterable[str]) -> None:
    known = {f.name for f in fields(SamplingParams) if f.init}
    unknown = sorted(set(given) - known)
    if unknown:
        raise InvalidRequestError(f"unknown sampling parameter {unknown[0]!r}; known are {', '.join(sorted(known))}")
