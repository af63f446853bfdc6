"""``priority``: urgent requests first. Decides the waiting order and the victim from ``priority`` and arrival alone.

No state, no clock. Engine thread.
"""

from collections.abc import Sequence

from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins.first_party.ordering import WHOLE_QUEUE, best_first
from minivllm_plugin.views import EngineState, RequestView

__all__ = ["PriorityPolicy"]


class PriorityPolicy:
    """The smaller ``priority`` first, then who came first; the victim is the opposite end.

    Source: vLLM's ``scheduling_policy="priority"``. The engine has the same rule as direct code,
    ``LLM(scheduling_policy="priority")``, and that is stricter in two ways: it also gives running requests their turns by
    rank, so nobody less urgent has a place in the batch (and is safe) when an urgent one needs a block; and it lets urgent
    requests pass for ever, where under a policy the oldest request goes first once it was passed over in 64 steps. Use
    this one where that guarantee is wanted, or beside other policies.

    Cost: one pass over the waiting requests (at most 1,024) in a step that may admit somebody.
    """

    minivllm_name = "priority"
    minivllm_waiting_window = WHOLE_QUEUE

    @hookimpl
    def minivllm_order_waiting(self, waiting: Sequence[RequestView], state: EngineState) -> list[str]:
        return best_first(waiting, state, _rank)

    @hookimpl
    def minivllm_select_victims(self, running: Sequence[RequestView]) -> list[str]:
        return [request.request_id for request in sorted(running, key=_rank, reverse=True)]


def _rank(request: RequestView) -> tuple[int, int]:
    return request.priority, request.arrival
