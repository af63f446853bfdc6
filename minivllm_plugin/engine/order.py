"""The engine's own order: whose turn comes first, who waits where, who makes room. FCFS or priority; direct code, no hook.

Reads sequences, changes none; the queue that it is given is the Scheduler's.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable

from minivllm_plugin.config import SchedulingPolicy
from minivllm_plugin.engine.sequence import Sequence

__all__ = ["Order", "rank"]


def rank(seq: Sequence) -> tuple[int, int]:
    """Place in the ``priority`` order: the smaller number first, then who came first."""
    return seq.priority, seq.arrival


def _first_come(seq: Sequence) -> tuple[int, int]:
    return not seq.num_preemptions, seq.arrival


class Order:
    """First come, first served; or by :func:`rank`."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self.by_priority = policy == "priority"

    def enqueue(self, waiting: deque[Sequence], seq: Sequence) -> None:
        """Put a new sequence into its place."""
        if self.by_priority:
            insort(waiting, seq, key=rank)
        else:
            waiting.append(seq)

    def requeue(self, waiting: deque[Sequence], seq: Sequence) -> None:
        """Put a preempted sequence back: to the front, or to its rank."""
        if self.by_priority:
            insort(waiting, seq, key=rank)
        else:
            waiting.appendleft(seq)

    def restore(self, waiting: deque[Sequence]) -> None:
        """Sort a queue that a policy had in another order; under fcfs whoever was preempted goes first, then by arrival."""
        key = rank if self.by_priority else _first_come
        ordered = sorted(waiting, key=key)
        waiting.clear()
        waiting.extend(ordered)

    def turns(self, running: Iterable[Sequence]) -> list[Sequence]:
        """Running sequences, longest without a turn first, so that a budget below their number goes round.

        By rank alone under priority: whoever has a place in the batch is no victim any more, so the one that needs a block must
        come before all those that should make room for it.
        """
        if self.by_priority:
            return sorted(running, key=rank)
        return sorted(running, key=lambda seq: seq.last_turn)

    def victim(self, candidates: list[Sequence]) -> Sequence:
        """The least recently scheduled, and of equals the one admitted last; under priority the last by rank."""
        if self.by_priority:
            return max(candidates, key=rank)
        return min(reversed(candidates), key=lambda seq: seq.last_scheduled_step)
