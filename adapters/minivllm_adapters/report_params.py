"""What a call wants to be told, and which of its completions: log-probabilities, ``n``, ``best_of``, ``echo``. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm_adapters.value_checks import flag, integer
from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.sampling_parameters import MAX_LOGPROBS

__all__ = ["REPORT", "ReportPlan", "wanted_report"]

REPORT = frozenset({"logprobs", "top_logprobs", "echo", "best_of"})
MAX_BEST_OF = 128


@dataclass(frozen=True, slots=True)
class ReportPlan:
    """What is returned of what is generated.

    Attributes:
        choices_per_prompt: OpenAI's ``n``.
        best_of: so many are generated for each prompt, and the likeliest are returned.
        num_top_logprobs: of the most likely tokens, told at each place; None: no log-probabilities are asked for.
        echo: the prompt's text goes before each completion's.
    """

    choices_per_prompt: int = 1
    best_of: int = 1
    num_top_logprobs: int | None = None
    echo: bool = False

    @property
    def sampling(self) -> dict[str, object]:
        """Sampling parameters that follow from it."""
        changes: dict[str, object] = {"n": self.best_of} if self.best_of > 1 else {}
        if self.num_top_logprobs is not None or self.best_of > self.choices_per_prompt:  # what is chosen by
            changes["logprobs"] = self.num_top_logprobs or 0
        return changes


def wanted_report(wanted: Mapping[str, Any], *, stream: bool, text_completion: bool) -> ReportPlan:
    """
    Raises:
        InvalidRequestError: a value has the wrong type or range, or needs another one.
        UnsupportedFeatureError: LiteLLM or a stream has no place for it.
    """
    choices = integer(wanted, "n", 1)
    if wanted.get("prompt_logprobs") is not None and (stream or text_completion):
        raise UnsupportedFeatureError(
            "prompt_logprobs have no place in a stream or a text completion; use litellm.completion(…) without stream"
        )
    return ReportPlan(
        choices_per_prompt=choices,
        best_of=_best_of(wanted, choices, stream=stream, text_completion=text_completion),
        num_top_logprobs=_logprobs(wanted, text_completion=text_completion),
        echo=_echo(wanted, stream=stream, text_completion=text_completion),
    )


def _best_of(wanted: Mapping[str, Any], choices: int, *, stream: bool, text_completion: bool) -> int:
    best_of = integer(wanted, "best_of", choices)
    if not 1 <= choices <= MAX_BEST_OF:
        raise InvalidRequestError(f"n={choices} must be between 1 and {MAX_BEST_OF}")
    if not choices <= best_of <= MAX_BEST_OF:
        raise InvalidRequestError(f"best_of={best_of} must be between n={choices} and {MAX_BEST_OF}")
    if best_of > choices and (stream or not text_completion):
        raise UnsupportedFeatureError(f"best_of={best_of} needs a text completion that is not streamed: it chooses at the end")
    return best_of


def _logprobs(wanted: Mapping[str, Any], *, text_completion: bool) -> int | None:
    asked, top = wanted.get("logprobs", False), integer(wanted, "top_logprobs", 0)
    if not 0 <= top <= MAX_LOGPROBS:
        raise InvalidRequestError(f"top_logprobs={top} must be between 0 and {MAX_LOGPROBS}")
    if text_completion and asked is not False:
        raise UnsupportedFeatureError(
            "logprobs of a text completion do not get through LiteLLM; use litellm.completion(logprobs=True, top_logprobs=…)"
        )
    if not isinstance(asked, bool):
        raise InvalidRequestError(f"logprobs must be True or False in a chat, got {asked!r:.80}; their number is top_logprobs")
    if top and not asked:
        raise InvalidRequestError(f"top_logprobs={top} needs logprobs=True")
    return top if asked else None


def _echo(wanted: Mapping[str, Any], *, stream: bool, text_completion: bool) -> bool:
    echo = flag(wanted, "echo", False)
    if echo and (stream or not text_completion):
        raise UnsupportedFeatureError("echo needs a text completion that is not streamed")
    return echo
