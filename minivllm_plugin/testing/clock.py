"""A clock that moves when it is told to: for engines whose times a test wants to know exactly."""

__all__ = ["VirtualClock"]


class VirtualClock:
    """Seconds, to be passed as ``LLMEngine(…, clock=clock)``. One thread.

    Args:
        now: what it shows first.
        tick: seconds that every reading takes; 0 stands still between two calls of :meth:`advance`.
    """

    def __init__(self, now: float = 0.0, *, tick: float = 0.0) -> None:
        self.now = now
        self.tick = tick

    def __call__(self) -> float:
        shown = self.now
        self.now += self.tick
        return shown

    def advance(self, seconds: float) -> None:
        """Let ``seconds`` pass.

        Raises:
            ValueError: they are negative; no clock of an engine runs backwards.
        """
        if seconds < 0:
            raise ValueError(f"seconds={seconds} must not be negative")
        self.now += seconds
