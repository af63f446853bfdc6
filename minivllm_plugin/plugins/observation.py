"""Builds the records that observers receive and hands them out. One per engine, engine thread.

A record is built only if somebody implements its hook. Times of live requests are kept here, not on the Sequence, and only
while somebody asks for outcomes.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from minivllm_plugin.engine.hooks import StepTimes
from minivllm_plugin.engine.sequence import Sequence, computes_prompt
from minivllm_plugin.engine.steering import engine_state, request_view
from minivllm_plugin.errors import RequestRejectedError
from minivllm_plugin.events import BlockEvent, OutcomeReason, RequestOutcome, StepPlan, StepReport
from minivllm_plugin.plugins.calls import CallPolicy, HookCall
from minivllm_plugin.plugins.queued import DeliveryThread

if TYPE_CHECKING:
    from minivllm_plugin.engine.llm_engine import RequestProgress
    from minivllm_plugin.engine.scheduler import Scheduler

__all__ = ["Observation"]


@dataclass(slots=True)
class _Moments:
    """When a live request reached its stages, on the engine's clock."""

    queued: float
    scheduled: float | None = None
    first_token: float | None = None


class Observation:
    """Tells observers what happened.

    Args:
        calls: hook (``"minivllm_step_started"``, …) -> who implements it.
        policy: shared with the policies of the same engine.
        scheduler: is read, never changed; except that its pool's log is switched on if block events are wanted.
        clock: the engine's.
    """

    def __init__(
        self,
        calls: Mapping[str, SequenceABC[HookCall]],
        policy: CallPolicy,
        scheduler: "Scheduler",
        clock: Callable[[], float],
    ) -> None:
        self._calls = {hook: list(entries) for hook, entries in calls.items() if entries}
        self._policy = policy
        self._scheduler = scheduler
        self._clock = clock
        self._threads: dict[str, DeliveryThread] = {}
        self._moments: dict[str, _Moments] = {}
        self._plan: StepPlan | None = None
        # Of the latest plan, while it has not been told: whom it admitted, and whom it put out.
        self._admitted: list[Sequence] = []
        self._preempted: list[Sequence] = []
        self._hook_seconds = 0.0
        if "minivllm_blocks_changed" in self._calls:
            scheduler.block_manager.log = []

    # --- told by the engine ----------------------------------------------------------------------------------------

    def request_queued(self, seq: Sequence) -> None:
        if "minivllm_request_finished" in self._calls:
            self._moments[seq.request_id or ""] = _Moments(seq.arrival_time)
        if "minivllm_request_queued" in self._calls:
            cached = self._scheduler.block_manager.count_cached_tokens(seq)
            self._tell("minivllm_request_queued", request=request_view(seq, cached), state=self._state())

    def request_rejected(self, seq: Sequence, error: RequestRejectedError) -> None:
        if "minivllm_request_finished" in self._calls:
            outcome = RequestOutcome("rejected", None, seq.num_prompt_tokens, 0, 0, 0, self._clock(), None, None, None)
            self._tell("minivllm_request_finished", request=request_view(seq, 0), outcome=outcome)

    def step_planned(self, batch: SequenceABC[Sequence]) -> StepPlan | None:
        if self._moments:
            now = self._clock()
            for seq in self._scheduler.admitted:
                moments = self._moments.get(seq.request_id or "")
                if moments is not None and moments.scheduled is None:
                    moments.scheduled = now
        wanted = "minivllm_step_started" in self._calls or "minivllm_engine_error" in self._calls
        return self._make_plan(batch) if wanted else None

    def step_started(self, plan: object) -> None:
        if isinstance(plan, StepPlan):
            self._plan = plan = self._without_ended(plan)
            self._admitted, self._preempted = [], []
            self._tell("minivllm_step_started", plan=plan)

    def launch_failed(self, plan: object) -> None:
        if isinstance(plan, StepPlan):
            self._plan = plan

    def step_finished(
        self, finished: SequenceABC[Sequence], progress: SequenceABC["RequestProgress"], num_tokens: int, times: StepTimes
    ) -> None:
        self._policy.note_step(times.schedule + times.run + times.postprocess)
        reported = {entry.request_id for entry in progress}
        ended = [seq for seq in finished if seq.request_id in reported]  # an aborted one was told of when it was aborted
        if self._moments:
            self._note_first_tokens(progress)
        if "minivllm_step_finished" in self._calls:
            self._tell("minivllm_step_finished", report=self._make_report(progress, num_tokens, times))
        self._tell_of_blocks()
        for seq in ended:
            self._tell_of_end(seq)
        self._plan = None  # what fails from here on fails between two steps

    def request_aborted(self, seq: Sequence) -> None:
        self._tell_of_blocks()
        self._tell_of_end(seq)

    def engine_error(self, error: BaseException) -> None:
        """The engine dies of ``error`` now."""
        self._tell("minivllm_engine_error", error=error, plan=self._plan)

    def close(self) -> None:
        """End the threads of slow observers, once they have delivered."""
        for thread in self._threads.values():
            thread.close()

    # --- records ---------------------------------------------------------------------------------------------------

    def _make_plan(self, batch: SequenceABC[Sequence]) -> StepPlan:
        scheduler = self._scheduler
        self._admitted = scheduler.admitted
        # With those of a plan that was never told, because its batch ended before it was launched.
        self._preempted = list(dict.fromkeys([*self._preempted, *scheduler.preempted]))
        return StepPlan(
            tuple([seq.request_id or "" for seq in batch]),
            tuple([seq.num_scheduled_tokens for seq in batch]),
            tuple([computes_prompt(seq) for seq in batch]),
            tuple([seq.request_id or "" for seq in scheduler.admitted if not seq.num_preemptions]),
            tuple([seq.request_id or "" for seq in scheduler.admitted if seq.num_preemptions]),
            tuple([seq.request_id or "" for seq in self._preempted]),
            scheduler.step_budget,
            self._state(),
        )

    def _without_ended(self, plan: StepPlan) -> StepPlan:
        """A plan that waited for the step before it, less those who were aborted meanwhile: nothing may follow their end."""
        ended = {seq.request_id for seq in (*self._admitted, *self._preempted) if seq.is_finished}
        if not ended:
            return plan
        moved = ([name for name in names if name not in ended] for names in (plan.admitted, plan.resumed, plan.preempted))
        admitted, resumed, preempted = map(tuple, moved)
        return plan._replace(admitted=admitted, resumed=resumed, preempted=preempted)

    def _make_report(self, progress: SequenceABC["RequestProgress"], num_tokens: int, times: StepTimes) -> StepReport:
        gained = [(entry.request_id, entry.token_id) for entry in progress if entry.token_id is not None]
        spent = self._policy.total_seconds - self._hook_seconds
        self._hook_seconds = self._policy.total_seconds
        return StepReport(
            tuple([request_id for request_id, _ in gained]),
            tuple([token_id for _, token_id in gained]),
            tuple([(entry.request_id, entry.finish_reason) for entry in progress if entry.finish_reason is not None]),
            num_tokens,
            times.schedule,
            times.run,
            times.postprocess,
            spent,
            self._state(),
        )

    def _note_first_tokens(self, progress: SequenceABC["RequestProgress"]) -> None:
        now = self._clock()
        for entry in progress:
            moments = self._moments.get(entry.request_id)
            if moments is not None and moments.first_token is None and entry.token_id is not None:
                moments.first_token = now

    def _tell_of_end(self, seq: Sequence) -> None:
        if "minivllm_request_finished" not in self._calls:
            self._moments.clear()
            return
        now = self._clock()
        moments = self._moments.pop(seq.request_id or "", None) or _Moments(seq.arrival_time)
        reason: OutcomeReason = seq.finish_reason or "abort"
        scheduled, first = moments.scheduled, moments.first_token
        outcome = RequestOutcome(
            reason,
            seq.stop_reason,
            seq.num_prompt_tokens,
            seq.num_completion_tokens,
            seq.prompt_cached_tokens or 0,
            seq.num_preemptions,
            now,
            None if scheduled is None else scheduled - moments.queued,
            None if scheduled is None or first is None else first - scheduled,
            None if first is None else now - first,
        )
        self._tell("minivllm_request_finished", request=request_view(seq), outcome=outcome)

    def _tell_of_blocks(self) -> None:
        pool = self._scheduler.block_manager
        if not pool.log:
            return
        events: tuple[BlockEvent, ...] = tuple(pool.log)
        if "minivllm_blocks_changed" in self._calls:
            pool.log.clear()
            self._tell("minivllm_blocks_changed", events=events)
        else:  # the last listener was taken out
            pool.log = None

    def _state(self) -> Any:
        return engine_state(self._scheduler, self._clock())

    # --- delivery --------------------------------------------------------------------------------------------------

    def _tell(self, hook: str, **arguments: Any) -> None:
        for entry in list(self._calls.get(hook, ())):
            thread = self._threads.get(entry.plugin)
            if thread is not None:  # one of its hooks was slow; all go the same way, or they would overtake each other
                thread.put(partial(entry.deliver, arguments))
                continue
            try:
                entry.call(arguments)
            except Exception as error:
                entry.failed(error)
                if not entry.is_enabled:
                    self._drop(hook, entry)
                continue
            entry.succeeded()
            if entry.is_slow():
                entry.disable(f"slow: {entry.slowness()}", "is called on a thread of its own from now on")
                self._threads[entry.plugin] = DeliveryThread(entry.plugin)

    def _drop(self, hook: str, entry: HookCall) -> None:
        self._calls[hook] = [other for other in self._calls[hook] if other is not entry]
        if not self._calls[hook]:
            del self._calls[hook]
