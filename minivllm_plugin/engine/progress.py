"""What a step did, as plain records for whoever drives the engine. No state."""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

from minivllm_plugin.engine.logprobs import TokenLogprobs
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import FinishReason, Sequence
from minivllm_plugin.errors import EngineError

__all__ = ["NOTHING", "EngineStalledError", "RequestProgress", "StepOutput", "known_lengths", "progress_of", "stalled"]


class EngineStalledError(EngineError):
    """There is work, but the scheduler can run none of it: a bug, reported instead of spinning."""


@dataclass(frozen=True, slots=True)
class RequestProgress:
    """What one step did for one request: at most one token, and perhaps the end. A step with drafts may have several of one
    request, in order.

    ``logprobs`` tell of the token, ``prompt_logprobs`` come with the first one; both only if they were asked for.
    ``embedding`` is the result of a request that pools, and comes with its end.
    """

    request_id: str
    token_id: int | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    embedding: list[float] | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did. ``progress`` holds only requests that gained a token or ended. ``number`` is that of the scheduling that
    chose the batch; a later batch may be scheduled already."""

    batch: tuple[Sequence, ...]
    is_prefill: bool
    num_tokens: int
    progress: tuple[RequestProgress, ...]
    number: int = 0


NOTHING = StepOutput((), False, 0, ())


def known_lengths(batch: SequenceABC[Sequence]) -> list[int | None]:
    """Tokens of each sequence before its new ones are taken in. None for one that was aborted meanwhile: abort() reported it, and
    to report it again would end it twice."""
    return [None if seq.is_finished else seq.num_tokens for seq in batch]


def progress_of(batch: SequenceABC[Sequence], lengths: SequenceABC[int | None]) -> tuple[RequestProgress, ...]:
    """What became of each sequence since :func:`known_lengths`."""
    return tuple(
        entry
        for seq, length in zip(batch, lengths, strict=True)
        if length is not None and (seq.num_tokens > length or seq.is_finished)
        for entry in _progress(seq, length)
    )


def stalled(scheduler: Scheduler) -> EngineStalledError:
    """There is work and no batch of it."""
    waiting, running = len(scheduler.waiting), len(scheduler.running)
    return EngineStalledError(f"{waiting} waiting and {running} running requests, but none can be scheduled")


def _progress(seq: Sequence, length: int) -> Iterator[RequestProgress]:
    """What became of ``seq``, which had ``length`` tokens before: one record a token, the last one with its end."""
    request_id = seq.request_id or ""
    if seq.num_tokens == length:
        yield RequestProgress(request_id, None, seq.finish_reason, seq.stop_reason, embedding=seq.embedding)
        return
    for position in range(length, seq.num_tokens - 1):  # right drafts; their sequences ask for no log-probabilities
        yield RequestProgress(request_id, seq.token_ids[position], None, None)
    is_scored = seq.num_completion_tokens == 1 and seq.sampling_params.prompt_logprobs is not None
    prompt = tuple(seq.prompt_logprobs) if is_scored else None  # of a prompt of one token: nothing
    logprobs = seq.logprobs[-1] if seq.logprobs else None
    yield RequestProgress(request_id, seq.last_token, seq.finish_reason, seq.stop_reason, logprobs, prompt)
