"""What a layer knows of the ranks that compute it together: which one it is, how many there are, how to reach them.

Passed to the layers when they are built; there is no global group. With one rank every method returns its argument, and
nothing is imported, counted or copied.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["SINGLE", "Group", "LostPeerError", "ParallelContext"]


class LostPeerError(RuntimeError):
    """A collective failed: another rank is gone, or stands still."""


class Group(Protocol):
    """The collective operations of the layers. Every rank calls the same ones in the same order, on one thread.

    They raise LostPeerError.
    """

    def all_reduce(self, x: "Tensor") -> "Tensor":
        """The sum of every rank's ``x``, on every rank. ``x`` may be written and returned."""
        ...

    def gather(self, x: "Tensor") -> "list[Tensor] | None":
        """Every rank's ``x`` (of one shape) in the order of the ranks, on rank 0; None on the others."""
        ...


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """One rank's place.

    Attributes:
        rank: from 0 to ``size - 1``. Rank 0 samples.
        size: number of ranks.
        group: how they reach each other; None exactly when there is one.
    """

    rank: int = 0
    size: int = 1
    group: Group | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.rank < self.size, f"rank {self.rank} of {self.size}"
        assert (self.group is None) == (self.size == 1), "a group is what several ranks have"

    def all_reduce(self, x: "Tensor") -> "Tensor":
        """The sum over the ranks, on every rank."""
        return x if self.group is None else self.group.all_reduce(x)

    def gather(self, x: "Tensor") -> "list[Tensor] | None":
        """Every rank's ``x`` on rank 0, None on the others."""
        return [x] if self.group is None else self.group.gather(x)

    def share(self, count: int) -> tuple[int, int]:
        """Where this rank's part of ``count`` equal things begins and ends. ``count`` divides by the number of ranks."""
        assert count % self.size == 0, f"{count} over {self.size} ranks"
        part = count // self.size
        return self.rank * part, (self.rank + 1) * part


SINGLE = ParallelContext()
"""One rank alone: the whole model in one process."""
