"""``lcf-victim``: least computed first. Decides who is preempted from how many computed tokens each would lose.

No state. Engine thread.
"""

from collections.abc import Sequence

from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.views import RequestView

__all__ = ["LeastComputedVictim"]


class LeastComputedVictim:
    """Who has the fewest computed tokens makes room, of equals the one that came last; it may be the one in need itself.

    Source: vLLM issue 54644. Preemption here is by recompute, so the victim's computed tokens are what it may cost; what
    the prefix cache still holds when it returns is not computed twice.

    Cost: one sort of the running requests, on shortage only.
    """

    minivllm_name = "lcf-victim"

    @hookimpl
    def minivllm_select_victims(self, running: Sequence[RequestView]) -> list[str]:
        return [request.request_id for request in sorted(running, key=lambda one: (one.num_computed_tokens, -one.arrival))]
