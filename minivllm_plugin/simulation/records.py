"""What became of each request, and what was going on over time. Filled by one replica, read by the report."""

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["RequestRecord", "Timeline", "TimelinePoint"]

MAX_POINTS = 1024


@dataclass(slots=True)
class RequestRecord:
    """One request. Times are seconds since the start of the trace; None for what never happened.

    Attributes:
        index: its place in the trace.
        scheduled: start of the step in which it was first scheduled.
        num_prompt_blocks, num_hit_blocks: of its prompt, and of these found in the prefix cache at its first admission. With
            hash ids of whole blocks, what the ids describe; the token behind them is not counted.
        rejected: why it was never queued.
        token_times: end of the step that gave each token, if they were asked for.
    """

    index: int
    arrival: float
    num_prompt_tokens: int
    num_prompt_blocks: int
    num_output_tokens: int
    tenant: str
    replica: int = 0
    scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_completion_tokens: int = 0
    num_cached_tokens: int = 0
    num_hit_blocks: int = 0
    num_preemptions: int = 0
    finish_reason: str | None = None
    rejected: str | None = None
    token_times: "array[float] | None" = None

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean seconds of a token after the first; None for an answer of one token."""
        if self.finished is None or self.first_token is None or self.num_completion_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.num_completion_tokens - 1)

    @property
    def latency(self) -> float | None:
        """Seconds from arrival to the last token."""
        return None if self.finished is None else self.finished - self.arrival

    @property
    def queue_time(self) -> float | None:
        """Seconds from arrival to the step in which it was first scheduled."""
        return None if self.scheduled is None else self.scheduled - self.arrival


class TimelinePoint(NamedTuple):
    """One step: when it began, and what it found."""

    time: float
    num_used_blocks: int
    num_running: int
    num_waiting: int


@dataclass(slots=True)
class Timeline:
    """Totals over all steps, and a sample of at most 1,024 of them: every n-th, where n doubles as they become too many."""

    points: list[TimelinePoint] = field(default_factory=list)
    num_steps: int = 0
    busy_seconds: float = 0.0
    block_seconds: float = 0.0
    peak_blocks: int = 0
    num_batched_tokens: int = 0
    _stride: int = 1

    def add(self, time: float, seconds: float, used: int, running: int, waiting: int, num_tokens: int) -> None:
        """One step of ``seconds`` that began at ``time``."""
        self.busy_seconds += seconds
        self.block_seconds += used * seconds
        self.num_batched_tokens += num_tokens
        if used > self.peak_blocks:
            self.peak_blocks = used
        if not self.num_steps % self._stride:
            self.points.append(TimelinePoint(time, used, running, waiting))
            if len(self.points) > MAX_POINTS:
                del self.points[1::2]
                self._stride *= 2
        self.num_steps += 1
