"""A frozen picture of the engine between two steps, for people and pages. Built on the engine thread, read anywhere."""

import time
from dataclasses import dataclass
from itertools import chain, islice

from minivllm_plugin.engine.prompt_lookup import SpeculationStatistics
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.views import EngineState

__all__ = ["EngineSnapshot", "SequenceView", "take_snapshot"]

MAX_WAITING_SHOWN = 100


@dataclass(frozen=True, slots=True)
class SequenceView:
    """One live request. Counts are tokens; prompts and answers themselves are not shown."""

    request_id: str
    status: str
    num_prompt_tokens: int
    num_completion_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """Queues, pool and totals at one moment.

    Attributes:
        sequences: all that run, then the first of those that wait (at most 100, so that a long queue costs no time).
        num_cached_blocks: free blocks that can still be found by their content.
        num_drafted_tokens, num_accepted_tokens: guessed by prompt lookup since start, and those of them that came true.
        num_graph_replays, num_graph_captures: steps that were replayed from a recorded graph, and graphs recorded, since start.
        eager_steps: why others were launched op by op, and how many for each reason; empty where the runner does not say.
        prefix_hit_rate: tokens found in the cache / tokens looked up, since start.
        now: the moment, on ``time.monotonic()``'s clock.
    """

    step: int
    num_waiting: int
    num_running: int
    num_blocks: int
    num_free_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_preemptions: int
    num_evicted_blocks: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    sequences: tuple[SequenceView, ...]
    now: float = 0.0
    block_size: int = 0
    max_num_sequences: int = 0
    max_num_batched_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0
    num_graph_replays: int = 0
    num_graph_captures: int = 0
    eager_steps: tuple[tuple[str, int], ...] = ()

    @property
    def state(self) -> EngineState:
        """The same moment as plugins see it."""
        return EngineState(
            self.step,
            self.now,
            self.num_waiting,
            self.num_running,
            self.num_blocks,
            self.num_free_blocks,
            self.num_cached_blocks,
            self.block_size,
            self.max_num_sequences,
            self.max_num_batched_tokens,
            self.num_preemptions,
        )

    @property
    def prefix_hit_rate(self) -> float:
        return self.prefix_hit_tokens / self.prefix_queried_tokens if self.prefix_queried_tokens else 0.0


def take_snapshot(scheduler: Scheduler, runner: object = None) -> EngineSnapshot:
    """Copy the state of ``scheduler``, and what ``runner`` counts, if it does (``counts``); call on the engine thread."""
    pool = scheduler.block_manager
    speculation = scheduler.speculation.statistics if scheduler.speculation is not None else SpeculationStatistics()
    counts = getattr(runner, "counts", None)
    return EngineSnapshot(
        step=scheduler.num_steps,
        num_waiting=len(scheduler.waiting),
        num_running=len(scheduler.running),
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free_blocks,
        num_used_blocks=pool.num_blocks - pool.num_free_blocks,
        num_cached_blocks=pool.num_cached_blocks,
        num_preemptions=scheduler.num_preemptions,
        num_evicted_blocks=pool.statistics.evicted_blocks,
        prefix_queried_tokens=pool.statistics.queried_tokens,
        prefix_hit_tokens=pool.statistics.hit_tokens,
        sequences=tuple(_view(seq) for seq in chain(scheduler.running, islice(scheduler.waiting, MAX_WAITING_SHOWN))),
        now=time.monotonic(),
        block_size=pool.block_size,
        max_num_sequences=scheduler.max_num_sequences,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        num_drafted_tokens=speculation.drafted_tokens,
        num_accepted_tokens=speculation.accepted_tokens,
        num_graph_replays=counts.graph_replays if counts is not None else 0,
        num_graph_captures=counts.graph_captures if counts is not None else 0,
        eager_steps=tuple(counts.eager_steps.items()) if counts is not None else (),
    )


def _view(seq: Sequence) -> SequenceView:
    return SequenceView(
        request_id=seq.request_id or "",
        status="preempted" if seq.status.name == "WAITING" and seq.num_preemptions else seq.status.name.lower(),
        num_prompt_tokens=seq.num_prompt_tokens,
        num_completion_tokens=seq.num_completion_tokens,
        num_computed_tokens=seq.num_computed_tokens,
        num_cached_tokens=seq.num_cached_tokens,
        num_preemptions=seq.num_preemptions,
        block_ids=tuple(seq.block_table),
    )
