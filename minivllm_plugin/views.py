"""What a plugin may look at, and what it may answer. Immutable records; no Sequence, no Block, no tensor.

Built on the engine thread at the moment of a question, kept by whoever wants to: they never change and hold nothing alive.
Fields are only ever added, at the end, with a default. Lengths are tokens, times are seconds on the engine's clock
(``time.monotonic()``, or a simulator's virtual one).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

__all__ = ["Admit", "Budget", "CandidateBlock", "EngineState", "Reject", "RequestView"]

EMPTY: Mapping[str, Any] = MappingProxyType({})


class RequestView(NamedTuple):
    """One request as a policy or an observer sees it.

    Attributes:
        arrival: 0 for the first request of this engine, 1 for the second, … Never changes, also not by preemption.
        arrival_time: when it was queued.
        num_cached_tokens: while it waits, how much of it the prefix cache holds now; once it has run, how much of it was
            found at its latest admission.
        num_computed_tokens: tokens whose K/V stand in its blocks; 0 while it waits.
        max_tokens: asked for; None means until the context window is full.
        last_scheduled_step: -1 before its first step.
        metadata: what the caller gave along (``submit(metadata=…)``), read-only; ``tenant`` and ``user`` are the usual keys.
    """

    request_id: str
    arrival: int
    arrival_time: float
    priority: int
    num_prompt_tokens: int
    num_completion_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    max_tokens: int | None
    num_blocks: int
    num_preemptions: int
    last_scheduled_step: int
    metadata: Mapping[str, Any] = EMPTY

    @property
    def num_tokens(self) -> int:
        """Prompt plus completion so far."""
        return self.num_prompt_tokens + self.num_completion_tokens

    @property
    def tenant(self) -> str:
        """Who asks: ``metadata["tenant"]``, else ``metadata["user"]``, else the empty string."""
        return str(self.metadata.get("tenant") or self.metadata.get("user") or "")


class EngineState(NamedTuple):
    """Queues, pool and limits at one moment.

    Attributes:
        now: the moment, on the same clock as ``arrival_time``.
        num_cached_blocks: free blocks that can still be found by their content.
    """

    step: int
    now: float
    num_waiting: int
    num_running: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    block_size: int
    max_num_sequences: int
    max_num_batched_tokens: int
    num_preemptions: int

    @property
    def num_used_blocks(self) -> int:
        return self.num_blocks - self.num_free_blocks


class CandidateBlock(NamedTuple):
    """A free block that holds findable K/V and might be evicted.

    Attributes:
        num_hits: how often a request found it since it was stored.
        age: how many blocks were freed after it; 0 is the one freed last.
        depth: its place in its chain: 0 holds the first tokens of a prompt. Evicting it makes everything behind it unfindable.
        salt: the cache salt of those who may find it.
    """

    block_id: int
    num_hits: int
    age: int
    depth: int
    salt: str | None = None


class Budget(NamedTuple):
    """Limits of one step; None leaves the engine's own. Clamped to at least 1 and at most the engine's.

    Attributes:
        num_tokens: tokens computed.
        num_prefill_tokens: of these, prompt tokens.
        num_sequences: running sequences above which nobody is admitted; those that run stay.
    """

    num_tokens: int | None = None
    num_prefill_tokens: int | None = None
    num_sequences: int | None = None


class Admit(NamedTuple):
    """The request may queue: ends the question, where None lets the next policy answer."""


class Reject(NamedTuple):
    """The request is refused with RequestRejectedError.

    Attributes:
        reason: shown to the caller.
        retry_after: seconds until it may be worth trying again.
    """

    reason: str
    retry_after: float | None = None
