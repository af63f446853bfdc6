"""The last minutes: compressed frames to go back to, and the numbers for the chart under the slider. Guarded by its owner.

Bounded in time and in number. At 1,000 blocks a frame is about 1 kB; five busy minutes are 600 frames.
"""

import zlib
from collections import deque
from typing import NamedTuple

__all__ = ["SPAN", "History", "Sample"]

SPAN = 300.0  # seconds kept
MOST_FRAMES = 620


class Sample(NamedTuple):
    """One moment. Blocks are counts; ``preemptions`` counts since the engine started."""

    time: float
    held: int
    shared: int
    cached: int
    num_blocks: int
    preemptions: int
    tokens_per_second: float


class History:
    """Oldest first."""

    def __init__(self) -> None:
        self._frames: deque[tuple[Sample, bytes]] = deque(maxlen=MOST_FRAMES)

    def add(self, sample: Sample, frame: bytes) -> None:
        """Keep a picture; drops what is older than five minutes."""
        self._frames.append((sample, zlib.compress(frame, 1)))
        while self._frames[0][0].time < sample.time - SPAN:
            self._frames.popleft()

    def samples(self) -> list[Sample]:
        return [sample for sample, _ in self._frames]

    def at(self, moment: float) -> bytes | None:
        """The frame that was on show at ``moment`` (seconds since the epoch), else the oldest; None without any."""
        chosen: bytes | None = self._frames[0][1] if self._frames else None
        for sample, frame in self._frames:
            if sample.time > moment:
                break
            chosen = frame
        return None if chosen is None else zlib.decompress(chosen)
