"""The plugin through which the page hears the engine. On the engine thread it only appends records to a queue.

Everything else, folding them into a picture above all, is done by whoever takes them, on another thread. One object serves one
engine after the other: when the registry replaces a dead engine, the new one's plugins are the same objects.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from minivllm_plugin.events import BlockEvent, RequestOutcome, StepPlan, StepReport
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins.facade import EngineHandle
from minivllm_plugin.views import EngineState, RequestView

__all__ = ["BlocksChanged", "EngineObserver", "EngineStarted", "EngineStopped", "Record", "RequestEnded", "RequestQueued"]


class EngineStarted(NamedTuple):
    """A new engine with an empty pool."""

    num_blocks: int
    block_size: int


class EngineStopped(NamedTuple):
    """It is closed, or has died of ``error`` (in words)."""

    error: str | None


class RequestQueued(NamedTuple):
    request: RequestView


class RequestEnded(NamedTuple):
    request: RequestView
    outcome: RequestOutcome


class BlocksChanged(NamedTuple):
    events: tuple[BlockEvent, ...]


Record: TypeAlias = EngineStarted | EngineStopped | RequestQueued | RequestEnded | BlocksChanged | StepPlan | StepReport


class EngineObserver:
    """Give it to an engine: ``LLM(plugins=[observer])``. Hooks run on the engine thread; :meth:`take` on any one other."""

    minivllm_name = "ui"
    minivllm_api = ">=1.0,<2"

    def __init__(self) -> None:
        self._records: deque[Record] = deque()  # unbounded: a lost record would make every later picture wrong
        self.handle: EngineHandle | None = None

    def take(self) -> list[Record]:
        """What happened since the last call, in order."""
        records = self._records
        return [records.popleft() for _ in range(len(records))]

    @hookimpl
    def minivllm_engine_started(self, engine: EngineHandle) -> None:
        self.handle = engine
        snapshot = engine.snapshot()
        assert snapshot is not None, "an engine that has started has a snapshot"
        self._records.append(EngineStarted(snapshot.num_blocks, snapshot.block_size))

    @hookimpl
    def minivllm_engine_stopped(self, engine: EngineHandle, error: BaseException | None) -> None:
        if self.handle is engine:
            self.handle = None
        self._records.append(EngineStopped(None if error is None else f"{type(error).__name__}: {error}"))

    @hookimpl
    def minivllm_request_queued(self, request: RequestView, state: EngineState) -> None:
        self._records.append(RequestQueued(request))

    @hookimpl
    def minivllm_step_started(self, plan: StepPlan) -> None:
        self._records.append(plan)

    @hookimpl
    def minivllm_step_finished(self, report: StepReport) -> None:
        self._records.append(report)

    @hookimpl
    def minivllm_blocks_changed(self, events: Sequence[BlockEvent]) -> None:
        self._records.append(BlocksChanged(tuple(events)))

    @hookimpl
    def minivllm_request_finished(self, request: RequestView, outcome: RequestOutcome) -> None:
        self._records.append(RequestEnded(request, outcome))
