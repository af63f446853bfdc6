"""An observer that writes down all it is told, and can say whether it makes sense."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from minivllm_plugin.engine.block_manager import BlockManager
from minivllm_plugin.events import BlockEvent, RequestOutcome, StepPlan, StepReport
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.testing.folding import FoldedBlocks
from minivllm_plugin.testing.invariants import InvariantError
from minivllm_plugin.views import EngineState, RequestView

__all__ = ["EventRecorder", "RecordedRequest"]


@dataclass(slots=True)
class RecordedRequest:
    """One request's life.

    Attributes:
        timeline: ``queued``, ``scheduled``, ``token``, ``preempted``, ``resumed``, and at the end the reason (``stop``,
            ``length``, ``abort``, ``error``, ``rejected``), in the order in which they were told.
        token_ids: of its completion.
    """

    request_id: str
    timeline: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    queued: RequestView | None = None
    outcome: RequestOutcome | None = None


class EventRecorder:
    """Pass it as a plugin, ``LLM(plugins=[recorder])``, and look at it afterwards (or between two steps).

    Written on the engine thread. An engine that is closed has told everything.

    Args:
        name: of the plugin.

    Attributes:
        calls: every call: name of the hook without its prefix, and its arguments by name.
        plans, reports: of all steps.
        block_events: of all steps; :attr:`blocks` is what they fold into.
        requests: by id; an id that is used again starts a new entry, the old one is in :attr:`earlier`.
    """

    def __init__(self, name: str = "recorder") -> None:
        self.minivllm_name = name
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.plans: list[StepPlan] = []
        self.reports: list[StepReport] = []
        self.block_events: list[BlockEvent] = []
        self.blocks = FoldedBlocks()
        self.requests: dict[str, RecordedRequest] = {}
        self.earlier: list[RecordedRequest] = []

    # --- looking at it -----------------------------------------------------------------------------------------------

    def timeline(self, request_id: str) -> list[str]:
        """What happened to one request, in order; see :class:`RecordedRequest`."""
        return self.requests[request_id].timeline

    def hooks(self) -> list[str]:
        """The names of all calls, without the prefix, in order."""
        return [name for name, _ in self.calls]

    def assert_consistent(self, *, all_ended: bool = True) -> None:
        """Every request was queued once, ran in the right order, and ended once (unless ``all_ended`` is False).

        Raises:
            InvariantError: naming the request and its timeline.
        """
        for request in (*self.earlier, *self.requests.values()):
            fault = _fault(request, all_ended)
            if fault is not None:
                raise InvariantError(f"request {request.request_id!r} {fault}: {request.timeline}")

    def assert_blocks_equal(self, pool: BlockManager) -> None:
        """Raise InvariantError unless the block events fold into what ``pool`` is. Between two steps only."""
        self.blocks.assert_equals(pool)

    # --- written by the engine -----------------------------------------------------------------------------------------

    @hookimpl
    def minivllm_engine_started(self, engine: Any) -> None:
        self._note("engine_started", engine=engine)

    @hookimpl
    def minivllm_engine_stopped(self, engine: Any, error: BaseException | None) -> None:
        self._note("engine_stopped", engine=engine, error=error)

    @hookimpl
    def minivllm_engine_error(self, error: BaseException, plan: StepPlan | None) -> None:
        self._note("engine_error", error=error, plan=plan)

    @hookimpl
    def minivllm_request_queued(self, request: RequestView, state: EngineState) -> None:
        self._note("request_queued", request=request, state=state)
        entry = self._new(request.request_id)
        entry.queued = request
        entry.timeline.append("queued")

    @hookimpl
    def minivllm_step_started(self, plan: StepPlan) -> None:
        self._note("step_started", plan=plan)
        self.plans.append(plan)
        for word, ids in (("preempted", plan.preempted), ("scheduled", plan.admitted), ("resumed", plan.resumed)):
            for request_id in ids:
                self.requests[request_id].timeline.append(word)

    @hookimpl
    def minivllm_step_finished(self, report: StepReport) -> None:
        self._note("step_finished", report=report)
        self.reports.append(report)
        for request_id, token_id in zip(report.request_ids, report.token_ids, strict=True):
            self.requests[request_id].timeline.append("token")
            self.requests[request_id].token_ids.append(token_id)

    @hookimpl
    def minivllm_blocks_changed(self, events: Sequence[BlockEvent]) -> None:
        self._note("blocks_changed", events=events)
        for event in events:
            self.block_events.append(event)
            self.blocks.apply(event)

    @hookimpl
    def minivllm_request_finished(self, request: RequestView, outcome: RequestOutcome) -> None:
        self._note("request_finished", request=request, outcome=outcome)
        entry = self._new(request.request_id) if outcome.reason == "rejected" else self.requests[request.request_id]
        entry.timeline.append(outcome.reason)
        entry.outcome = outcome

    def _note(self, hook: str, **arguments: Any) -> None:
        self.calls.append((hook, arguments))

    def _new(self, request_id: str) -> RecordedRequest:
        if request_id in self.requests:
            self.earlier.append(self.requests[request_id])
        entry = self.requests[request_id] = RecordedRequest(request_id)
        return entry


# What may follow what; an end may follow anything but a rejection's absence of everything.
_FOLLOWS = {
    "queued": ("scheduled",),
    "scheduled": ("token", "preempted"),
    "token": ("token", "preempted"),
    "preempted": ("resumed", "scheduled"),
    "resumed": ("token", "preempted"),
}
_ENDS = ("stop", "length", "abort", "error")


def _fault(request: RecordedRequest, must_have_ended: bool) -> str | None:
    """What is wrong with a timeline, or None."""
    words = request.timeline
    if words == ["rejected"]:
        return None
    if words[:1] != ["queued"]:
        return "was not queued first"
    for before, after in pairwise(words):
        if after not in (*_FOLLOWS.get(before, ()), *(_ENDS if before in _FOLLOWS else ())):
            return f"cannot be {after!r} after {before!r}"
    if words[-1] not in _ENDS:
        return "has not ended" if must_have_ended else None
    if words[-1] in ("stop", "length") and words[-2] != "token":
        return "ended by itself without a token"
    outcome = request.outcome
    if outcome is not None and outcome.num_completion_tokens != len(request.token_ids):
        return f"ended with {outcome.num_completion_tokens} tokens, of which {len(request.token_ids)} were told"
    return None
