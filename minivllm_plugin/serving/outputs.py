"""What callers get back. Frozen records with vLLM's names."""

from dataclasses import dataclass, field

from minivllm_plugin.engine.sequence import FinishReason
from minivllm_plugin.serving.logprobs import Logprob

__all__ = ["CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput", "StreamDelta"]


@dataclass(frozen=True, slots=True)
class StreamDelta:
    """What is new since the last look at a stream: one token or, for a reader who lags, several.

    Attributes:
        finish_reason: set on the last delta of a completion only.
        index: of the completion that it belongs to, for a request with ``n`` > 1.
        logprobs: one dictionary a token of ``token_ids``, if asked for.
        stop_reason: the stop string or stop token id that ended the request; None for the model's own end token.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    index: int = 0
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Moments in one request's life, seconds on ``time.time()``'s clock; None for what has not happened."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0

    @property
    def time_in_queue(self) -> float | None:
        """Seconds between arrival and the first step that computed it."""
        return None if self.first_scheduled_time is None else self.first_scheduled_time - self.arrival_time

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds between arrival and the first token."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion. ``token_ids`` include the token that ended it; ``text`` does not, unless asked for.

    Attributes:
        cumulative_logprob: sum over its tokens; None unless ``logprobs`` were asked for.
        logprobs: one dictionary a token: token id -> Logprob, the chosen token first.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request and what came of it so far.

    Attributes:
        prompt: the text that was given; None when token ids were.
        prompt_logprobs: one entry a prompt token, None for the first; None if they were not asked for.
        num_cached_tokens: prompt tokens whose K/V were found in the prefix cache at first admission.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
