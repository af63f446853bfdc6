"""Everything the page shows of one engine, kept current by folding the observer's records. Any one thread at a time.

Joins what single records leave apart: the plan of a step says who was admitted, the block events behind it say what was found.
"""

import time
from collections import Counter

from minivllm_plugin.events import BlockRemoved, BlocksFreed, BlocksHit, StepPlan, StepReport
from minivllm_plugin.views import EngineState
from minivllm_ui.observer import BlocksChanged, EngineStarted, EngineStopped, Record, RequestEnded, RequestQueued
from minivllm_ui.pool_map import PoolMap
from minivllm_ui.request_table import RequestTable, conversation_of, label_of
from minivllm_ui.story import Story

__all__ = ["LiveState"]


class LiveState:
    """Pool, requests and story of the engine that runs now.

    Attributes:
        status: ``starting``, ``serving``, ``closed`` or ``dead``; ``error`` says of what.
        generation: engines seen so far; a page forgets its pictures when it changes.
        engine_state: totals after the latest step.
    """

    def __init__(self) -> None:
        self.status = "starting"
        self.error: str | None = None
        self.generation = 0
        self.story = Story()
        self.requests = RequestTable()
        self.pool = PoolMap(0, 0, self.requests.slot_of)
        self.engine_state: EngineState | None = None
        self._arrivals: dict[str, bool] = {}  # admitted in the step being told of -> whether for the first time
        self._found: Counter[str] = Counter()
        self._kept: dict[str, int] = {}  # findable blocks that a request left behind when it let go

    def fold(self, record: Record) -> None:
        """Take in one record."""
        if isinstance(record, StepPlan):
            self.requests.planned(record)
            self._arrivals |= dict.fromkeys(record.admitted, True) | dict.fromkeys(record.resumed, False)
            for request_id in record.preempted:
                if (one := self.requests.live.get(request_id)) is not None:
                    self.story.preempted(one, len(self.pool.tables.get(request_id, ())))
        elif isinstance(record, StepReport):
            self.requests.reported(record)
            self.engine_state = record.state
        elif isinstance(record, BlocksChanged):
            self._blocks_changed(record)
        elif isinstance(record, RequestQueued):
            self.requests.queued(record.request)
        elif isinstance(record, RequestEnded):
            one = self.requests.ended(record.request, record.outcome)
            if one is not None:
                self.story.ended(one, record.outcome.reason, self._kept.pop(one.request_id, 0))
        elif isinstance(record, EngineStarted):
            self._started(record)
        elif isinstance(record, EngineStopped):
            self._stopped(record)

    def reusable_blocks_of(self, conversation: str) -> list[int]:
        """Free blocks that still hold what this conversation computed."""
        pool = self.pool
        return [
            block_id
            for block_id, value in enumerate(pool.state)
            if value == 1 and conversation_of(pool.last_holder[block_id]) == conversation
        ]

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _blocks_changed(self, record: BlocksChanged) -> None:
        for event in record.events:
            self.pool.apply(event)
            if isinstance(event, BlocksHit):
                self._found[event.request_id] = len(event.block_ids)
                self.requests.found(event.request_id, len(event.block_ids) * self.pool.block_size)
            elif isinstance(event, BlockRemoved) and event.cause == "evicted":
                self.story.evicted(len(event.block_ids))
            elif isinstance(event, BlocksFreed):
                self._kept[event.request_id] = sum(1 for block_id in event.block_ids if self.pool.is_findable(block_id))
        self._tell_of_arrivals()

    def _tell_of_arrivals(self) -> None:
        for request_id, is_first in self._arrivals.items():
            one = self.requests.live.get(request_id)
            if one is None:
                continue
            num_found = self._found.pop(request_id, 0)
            if not is_first:
                self.story.resumed(one, num_found)
                continue
            found = self.pool.tables.get(request_id, [])[:num_found]
            others = {label_of(other) for block_id in found for other in self.pool.holders(block_id) if other != request_id}
            self.story.admitted(one, sorted(others), num_found)
        self._arrivals.clear()
        self._found.clear()

    def _started(self, record: EngineStarted) -> None:
        self.generation += 1
        self.status, self.error, self.engine_state = "serving", None, None
        outcomes = self.requests.outcomes
        self.requests = RequestTable(outcomes=outcomes)
        self.pool = PoolMap(record.num_blocks, record.block_size, self.requests.slot_of)
        self._arrivals.clear()
        self._found.clear()
        self._kept.clear()
        self.story.tell("engine", f"Engine ready: {record.num_blocks} blocks of {record.block_size} tokens, all free")

    def _stopped(self, record: EngineStopped) -> None:
        self.status, self.error = ("closed", None) if record.error is None else ("dead", record.error)
        self.requests.live.clear()
        self.pool = PoolMap(self.pool.num_blocks, self.pool.block_size, self.requests.slot_of)
        self.story.tell("engine", f"Engine died: {record.error}" if record.error else "Engine closed")

    @property
    def now(self) -> float:
        """The engine's clock, between steps, too."""
        return time.monotonic()
