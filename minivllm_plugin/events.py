"""What happened: immutable records that observers receive. No behaviour, no reference into the engine.

One record a step, however many requests it held. Fields are only ever added, at the end, with a default. Times are seconds
on the engine's clock, lengths are tokens. Block records carry vLLM's field names where vLLM has the event
(``BlockStored``, ``BlockRemoved``, ``AllBlocksCleared`` of its KV events).
"""

from typing import Literal, NamedTuple, TypeAlias

from minivllm_plugin.views import EngineState

__all__ = [
    "AllBlocksCleared",
    "BlockEvent",
    "BlockRemoved",
    "BlockStored",
    "BlocksAllocated",
    "BlocksFreed",
    "BlocksHit",
    "OutcomeReason",
    "RequestOutcome",
    "StepPlan",
    "StepReport",
]

OutcomeReason = Literal["stop", "length", "abort", "error", "rejected"]


class StepPlan(NamedTuple):
    """What the scheduler decided, before anything is computed. Columns of equal length, one row a request of the batch.

    Attributes:
        num_tokens: tokens computed for each in this step; 1 for one that decodes, and one more for each guess that is verified.
        is_prompt: whether any of them belongs to the prompt, or is computed again after a preemption.
        admitted: ids that left the waiting queue for the first time in this step.
        resumed: ids that left it again, having been preempted before.
        preempted: ids that were put back into it.
        budget: most tokens that this step could have computed.
        state: after the decision.
    """

    request_ids: tuple[str, ...]
    num_tokens: tuple[int, ...]
    is_prompt: tuple[bool, ...]
    admitted: tuple[str, ...]
    resumed: tuple[str, ...]
    preempted: tuple[str, ...]
    budget: int
    state: EngineState


class StepReport(NamedTuple):
    """What one step produced. ``request_ids`` are those that gained a token, in the batch's order, each with its token; one whose
    guesses came true stands there several times in a row.

    Attributes:
        finished: id and reason of those that ended with this step.
        num_batched_tokens: tokens computed.
        schedule_seconds, run_seconds, postprocess_seconds, hook_seconds: where the step's time went; the last is what
            plugins took since the step before.
        state: after the step.
    """

    request_ids: tuple[str, ...]
    token_ids: tuple[int, ...]
    finished: tuple[tuple[str, OutcomeReason], ...]
    num_batched_tokens: int
    schedule_seconds: float
    run_seconds: float
    postprocess_seconds: float
    hook_seconds: float
    state: EngineState


class RequestOutcome(NamedTuple):
    """How a request ended, and what it took. Times are None for a stage that it never reached.

    Attributes:
        queue_seconds: from queued to first scheduled.
        prefill_seconds: from there to its first token.
        decode_seconds: from there to its end.
        num_cached_tokens: of the prompt, found in the prefix cache at its first admission.
    """

    reason: OutcomeReason
    stop_reason: int | str | None
    num_prompt_tokens: int
    num_completion_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    finished_time: float
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None


class BlocksAllocated(NamedTuple):
    """Free blocks were given to a request; what they held before is gone."""

    request_id: str
    block_ids: tuple[int, ...]


class BlocksHit(NamedTuple):
    """A request found the start of its tokens in these blocks and holds them now, too."""

    request_id: str
    block_ids: tuple[int, ...]
    block_hashes: tuple[int, ...]


class BlocksFreed(NamedTuple):
    """A request let go of these, deepest first. A block is free when its last holder has let go."""

    request_id: str
    block_ids: tuple[int, ...]


class BlockStored(NamedTuple):
    """A full, computed block entered the prefix index.

    Attributes:
        block_hashes: its chain key (one; a tuple as in vLLM).
        parent_block_hash: key of the block before it; None for the first of a prompt.
        extra_keys: the cache salt, if there is one.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    block_ids: tuple[int, ...]
    extra_keys: tuple[str, ...] = ()


class BlockRemoved(NamedTuple):
    """These left the index: their blocks were taken for something else (``evicted``), or can no longer be found or trusted
    (``forgotten``)."""

    block_hashes: tuple[int, ...]
    block_ids: tuple[int, ...]
    cause: Literal["evicted", "forgotten"] = "evicted"


class AllBlocksCleared(NamedTuple):
    """The whole index was emptied."""


BlockEvent: TypeAlias = BlocksAllocated | BlocksHit | BlocksFreed | BlockStored | BlockRemoved | AllBlocksCleared
