"""One line for everything that happens to a request, and to the blocks of the cache, on Python's logging.

Requests are logged at INFO, blocks at DEBUG, both on the logger ``minivllm_fair_share``. No line holds a prompt or its tokens.
"""

import logging
from collections.abc import Sequence

from minivllm_plugin.events import BlockEvent, RequestOutcome, StepPlan
from minivllm_plugin.plugins import EngineState, RequestTracer, RequestView, hookimpl

__all__ = ["LifeLog"]

logger = logging.getLogger("minivllm_fair_share")


class LifeLog(RequestTracer):
    """Logs the life of every request. The base class turns the engine's one record a step into calls a request."""

    def on_queued(self, request: RequestView, state: EngineState) -> None:
        logger.info(
            "%s queued: tenant %r, %d prompt tokens, %d waiting",
            request.request_id,
            request.tenant,
            request.num_prompt_tokens,
            state.num_waiting,
        )

    def on_scheduled(self, request_id: str, plan: StepPlan) -> None:
        logger.info("%s scheduled: step %d", request_id, plan.state.step)

    def on_preempted(self, request_id: str, plan: StepPlan) -> None:
        logger.info("%s preempted: step %d, %d free blocks", request_id, plan.state.step, plan.state.num_free_blocks)

    def on_resumed(self, request_id: str, plan: StepPlan) -> None:
        logger.info("%s resumed: step %d", request_id, plan.state.step)

    def on_finished(self, request: RequestView, outcome: RequestOutcome) -> None:
        logger.info("%s finished: %s, %s", request.request_id, outcome.reason, _totals(outcome))

    def on_aborted(self, request: RequestView, outcome: RequestOutcome) -> None:
        logger.info("%s aborted: %s", request.request_id, _totals(outcome))

    def on_rejected(self, request: RequestView, outcome: RequestOutcome) -> None:
        logger.info("%s rejected", request.request_id)

    @hookimpl
    def minivllm_blocks_changed(self, events: Sequence[BlockEvent]) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            for event in events:
                shown = {name: value for name, value in event._asdict().items() if name != "token_ids"}  # what people wrote
                fields = ", ".join(f"{name}={value!r}" for name, value in shown.items())
                logger.debug("%s: %s", type(event).__name__, fields)


def _totals(outcome: RequestOutcome) -> str:
    queued = "never scheduled" if outcome.queue_seconds is None else f"queued {outcome.queue_seconds * 1e3:.1f} ms"
    return f"{outcome.num_completion_tokens} tokens, {outcome.num_preemptions} preemptions, {queued}"
