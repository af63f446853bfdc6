"""How the first-party policies answer ``minivllm_order_waiting``: only the places that can be filled, out of all who wait.

Pure; no state.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import Any

from minivllm_plugin.views import EngineState, RequestView

__all__ = ["WHOLE_QUEUE", "best_first", "free_places"]

WHOLE_QUEUE = 1024
"""Waiting requests that these policies ask to see: EngineConfig's default ``max_queue_size``. With the first 64 alone, one tenant
that sends a thousand requests would hide everybody behind them."""


def free_places(state: EngineState) -> int:
    """Most requests that the coming step can admit. An answer may end there: the others follow in their present order."""
    return max(1, state.max_num_sequences - state.num_running)


def best_first(waiting: Sequence[RequestView], state: EngineState, key: Callable[[RequestView], Any]) -> list[str]:
    """Ids of those with the smallest keys, the smallest first, as many as there are free places. Keys must differ."""
    return [request.request_id for request in heapq.nsmallest(free_places(state), waiting, key)]
