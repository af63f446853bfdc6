"""The virtual clock of one replica. Whoever runs a step moves it; policies read it."""

from dataclasses import dataclass

__all__ = ["Clock"]


@dataclass(slots=True)
class Clock:
    """Seconds since the start of the trace."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now
