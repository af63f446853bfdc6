"""``lpm``: longest prefix match. Decides the waiting order from how much of each request the prefix cache holds now.

No state between two questions. Engine thread.
"""

from collections.abc import Sequence

from minivllm_plugin.config import check_integer
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins.first_party.arguments import check_number
from minivllm_plugin.plugins.first_party.ordering import WHOLE_QUEUE, best_first
from minivllm_plugin.views import EngineState, RequestView

__all__ = ["LongestPrefixMatch"]


class LongestPrefixMatch:
    """The most cached tokens first, so that a prefix is used while it is still there.

    Source: the ``lpm`` schedule policy of SGLang (Zheng et al., "SGLang: Efficient Execution of Structured Language Model
    Programs"). As there, a queue that is too long is served in the order of arrival. Beyond it, a floor for those without a
    prefix: each second of waiting counts as ``ageing`` cached tokens, so one of them is overtaken only by requests that arrive
    within (their cached tokens / ``ageing``) seconds after it. ``ageing=0`` is SGLang's order. Not taken over: holding back
    requests whose common prefix is not cached yet, since tokens are not shown to policies.

    Args:
        ageing: cached tokens that a second of waiting stands for. At least 0.
        longest_queue: with more requests waiting than this, they go in the order of arrival. At least 0. SGLang has 128, to
            save the matching of prefixes; here that is cheap, and a long queue is where the order matters most.

    Cost: one pass over the waiting requests (at most 1,024) in a step that may admit somebody.

    Raises:
        ConfigError: an argument outside its range.
    """

    minivllm_name = "lpm"
    minivllm_waiting_window = WHOLE_QUEUE

    def __init__(self, *, ageing: float = 50.0, longest_queue: int = WHOLE_QUEUE) -> None:
        self.ageing = check_number("ageing", ageing)
        self.longest_queue = check_integer("longest_queue", longest_queue, at_least=0)

    @hookimpl
    def minivllm_order_waiting(self, waiting: Sequence[RequestView], state: EngineState) -> list[str]:
        if state.num_waiting > self.longest_queue:  # answered, not left open: earlier answers have moved the queue about
            return best_first(waiting, state, lambda request: request.arrival)

        def lack(request: RequestView) -> tuple[float, int]:
            return -request.num_cached_tokens - self.ageing * (state.now - request.arrival_time), request.arrival

        return best_first(waiting, state, lack)
