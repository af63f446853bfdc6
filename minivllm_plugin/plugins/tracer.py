"""From one record a step to one call a request: for observers that think in requests.

The engine still pays for one record a step; the fan-out is paid by whoever uses this.
"""

from minivllm_plugin.events import RequestOutcome, StepPlan, StepReport
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.views import EngineState, RequestView

__all__ = ["RequestTracer"]


class RequestTracer:
    """Base class of observers: override what you need. All on the engine thread.

    A request's calls come in this order: ``on_queued``, ``on_scheduled``, then any number of ``on_token``, ``on_preempted`` and
    ``on_resumed``, then exactly one of ``on_finished`` (stop, length, error), ``on_aborted`` and ``on_rejected``, the last
    without any before it.
    """

    def on_queued(self, request: RequestView, state: EngineState) -> None:
        """It was put into the waiting queue."""

    def on_scheduled(self, request_id: str, plan: StepPlan) -> None:
        """It is in a batch for the first time."""

    def on_preempted(self, request_id: str, plan: StepPlan) -> None:
        """It lost its blocks and waits again."""

    def on_resumed(self, request_id: str, plan: StepPlan) -> None:
        """It is in a batch again."""

    def on_token(self, request_id: str, token_id: int, report: StepReport) -> None:
        """It gained a token."""

    def on_finished(self, request: RequestView, outcome: RequestOutcome) -> None:
        """It ended by itself."""

    def on_aborted(self, request: RequestView, outcome: RequestOutcome) -> None:
        """It was ended by its caller, a deadline or a closed stream."""

    def on_rejected(self, request: RequestView, outcome: RequestOutcome) -> None:
        """A policy refused it."""

    @hookimpl
    def minivllm_request_queued(self, request: RequestView, state: EngineState) -> None:
        self.on_queued(request, state)

    @hookimpl
    def minivllm_step_started(self, plan: StepPlan) -> None:
        for request_id in plan.preempted:
            self.on_preempted(request_id, plan)
        for request_id in plan.admitted:
            self.on_scheduled(request_id, plan)
        for request_id in plan.resumed:
            self.on_resumed(request_id, plan)

    @hookimpl
    def minivllm_step_finished(self, report: StepReport) -> None:
        for request_id, token_id in zip(report.request_ids, report.token_ids, strict=True):
            self.on_token(request_id, token_id, report)

    @hookimpl
    def minivllm_request_finished(self, request: RequestView, outcome: RequestOutcome) -> None:
        if outcome.reason == "abort":
            self.on_aborted(request, outcome)
        elif outcome.reason == "rejected":
            self.on_rejected(request, outcome)
        else:
            self.on_finished(request, outcome)
