"""``sjf``: shortest job first, with ageing. Decides the waiting order from what each request has left to do and has waited.

No state between two questions. Engine thread.
"""

from collections.abc import Sequence

from minivllm_plugin.config import check_integer
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins.first_party.arguments import check_number
from minivllm_plugin.plugins.first_party.ordering import WHOLE_QUEUE, best_first
from minivllm_plugin.views import EngineState, RequestView

__all__ = ["ShortestJobFirst"]


class ShortestJobFirst:
    """The least expected work first: uncached tokens to compute, plus the tokens it may still generate.

    Each second of waiting takes ``ageing`` tokens off, so a request of W tokens is overtaken only by requests that arrive within
    W / ``ageing`` seconds after it: nobody starves, even without the engine's own guarantee.

    Source: shortest-job-first with linear ageing, as operating systems have it; the length of an answer is not known, so the
    bound that its caller gave stands in for it. What is already computed by a preempted request counts as done.

    Args:
        output_weight: what a token to generate counts, where a prompt token to compute counts 1. At least 0; 0 looks at prompts
            only.
        ageing: tokens of work that a second of waiting makes up for. At least 0; 0 is pure shortest-first.
        assumed_tokens: stands in for ``max_tokens=None``. At least 1.

    Cost: one pass over the waiting requests (at most 1,024) in a step that may admit somebody.

    Raises:
        ConfigError: an argument outside its range.
    """

    minivllm_name = "sjf"
    minivllm_waiting_window = WHOLE_QUEUE

    def __init__(self, *, output_weight: float = 1.0, ageing: float = 50.0, assumed_tokens: int = 256) -> None:
        self.output_weight = check_number("output_weight", output_weight)
        self.ageing = check_number("ageing", ageing)
        self.assumed_tokens = check_integer("assumed_tokens", assumed_tokens, at_least=1)

    def work(self, request: RequestView) -> float:
        """Tokens that it is expected to cost, weighted, without regard to how long it has waited."""
        bound = self.assumed_tokens if request.max_tokens is None else request.max_tokens
        to_generate = max(0, bound - request.num_completion_tokens)
        return request.num_tokens - request.num_cached_tokens + self.output_weight * to_generate

    @hookimpl
    def minivllm_order_waiting(self, waiting: Sequence[RequestView], state: EngineState) -> list[str]:
        def urgency(request: RequestView) -> tuple[float, int]:
            return self.work(request) - self.ageing * (state.now - request.arrival_time), request.arrival

        return best_first(waiting, state, urgency)
