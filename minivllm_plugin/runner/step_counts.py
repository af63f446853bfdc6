"""How steps were computed: replayed or launched op by op, and why. Written on the engine thread, read anywhere.

A slow path that nobody asked for is said once in a warning and counted ever after; never silent.
"""

import logging
from collections import Counter

__all__ = ["GRAPHS_OFF", "PROMPT", "StepCounts"]

logger = logging.getLogger(__name__)

PROMPT = "a prompt in the batch"
GRAPHS_OFF = "graphs are switched off"


class StepCounts:
    """Counters of one runner.

    Attributes:
        graph_replays: steps whose forward pass was replayed.
        graph_captures: graphs that were recorded.
    """

    def __init__(self) -> None:
        self.graph_replays = 0
        self.graph_captures = 0
        self._eager: Counter[str] = Counter()
        self._told: set[str] = set()

    def eager(self, reason: str, *, expected: bool) -> None:
        """One step was launched op by op; a reason that is not ``expected`` is warned about the first time."""
        self._eager[reason] += 1
        if not expected:
            self.warn(reason)

    def warn(self, reason: str) -> None:
        """Say once why something runs op by op."""
        if reason not in self._told:
            self._told.add(reason)
            logger.warning("decode steps run without CUDA graphs, or a part of them does, which is slower: %s", reason)

    @property
    def eager_steps(self) -> dict[str, int]:
        """Reason -> steps."""
        return dict(self._eager)
