"""What policies may answer: each check turns an answer into plain data or raises TypeError. Runs inside the timed call of a
policy, since looking at an answer may run more of its code. No state.
"""

from collections.abc import Iterable
from itertools import islice
from typing import Any

from minivllm_plugin.views import Budget

__all__ = ["block_ids", "budget", "request_ids"]

MOST_IDS = 100_000  # a generator without end would hold everybody up


def request_ids(answer: Any) -> list[str]:
    """For ``order_waiting`` and ``select_victims``."""
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Iterable):
        raise TypeError(f"the answer must be a list of request ids, got {answer!r:.100}")
    ids = list(islice(answer, MOST_IDS))
    if not all(isinstance(request_id, str) for request_id in ids):
        raise TypeError("the answer must hold request ids, which are strings")
    return [str.__str__(request_id) for request_id in ids]  # of a subclass (NumPy has one), the text itself


def block_ids(answer: Any) -> list[int]:
    """For ``order_eviction``."""
    if isinstance(answer, (str, bytes)) or not isinstance(answer, Iterable):
        raise TypeError(f"the answer must be a list of block ids, got {answer!r:.100}")
    ids = list(islice(answer, MOST_IDS))
    if not all(isinstance(block_id, int) and not isinstance(block_id, bool) for block_id in ids):
        raise TypeError("the answer must hold block ids, which are integers")
    return ids


def budget(answer: Any) -> Budget:
    """For ``step_budget``."""
    if not isinstance(answer, Budget):
        raise TypeError(f"the answer must be a Budget, got {answer!r:.100}")
    for name, value in zip(Budget._fields, answer, strict=True):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise TypeError(f"{name} of a Budget must be an integer or None, got {value!r:.100}")
    return answer
