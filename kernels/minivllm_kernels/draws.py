"""How one token is to be drawn from one row of logits: as a record, and as device tensors for a whole batch.

Frozen; the numbers were checked where the request was made. Knows nothing of requests, seeds or kernels. The tensors of one
batch share one piece of memory, so that a step moves them with one copy, from pinned memory and without waiting.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["DrawTensors", "TokenDraw"]

BYTES_PER_ROW = 28


@dataclass(frozen=True, slots=True)
class TokenDraw:
    """One row's draw.

    Attributes:
        uniform: where in the cumulative distribution, [0, 1).
        temperature: greater than 0. Only ``sample_rows`` takes 0, which is the most likely token whatever else is said.
        top_k: keep the k most likely; 0 keeps all.
        top_p: keep the most likely until they reach this mass, (0, 1].
        min_p: drop what is less likely than this share of the most likely, [0, 1].
    """

    uniform: float
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


GREEDY = TokenDraw(0.0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class DrawTensors:
    """The draws of S rows on one device; the fields are those of :class:`TokenDraw`, temperature 0 is greedy.

    Attributes:
        uniform, top_p: float64 ``[S]``: a draw is a fraction of 2**53, and 0.9 is not a float32.
        temperature, min_p: float32 ``[S]``.
        top_k: int32 ``[S]``; 0, or no less than the vocabulary, keeps all.
        packed: uint8, the memory that all of them lie in.
    """

    uniform: Tensor
    top_p: Tensor
    temperature: Tensor
    min_p: Tensor
    top_k: Tensor
    packed: Tensor

    @classmethod
    def allocate(cls, rows: int, device: torch.device | str, *, pinned: bool = False) -> "DrawTensors":
        """Room for ``rows`` draws, uninitialised. ``pinned``: memory of the host that a CUDA device copies from by itself."""
        packed = torch.empty(rows * BYTES_PER_ROW, dtype=torch.uint8, device=device, pin_memory=pinned)
        start = 0

        def field(dtype: torch.dtype) -> Tensor:
            nonlocal start
            start += rows * dtype.itemsize
            return packed[start - rows * dtype.itemsize : start].view(dtype)

        float64, float32 = torch.float64, torch.float32  # the wide ones first: a view must start at a multiple of its size
        return cls(field(float64), field(float64), field(float32), field(float32), field(torch.int32), packed)

    @classmethod
    def build(cls, draws: Sequence[TokenDraw], device: torch.device | str) -> "DrawTensors":
        """``draws`` on ``device``, in one copy that the host does not wait for."""
        pinned = torch.device(device).type == "cuda"
        host = cls.allocate(len(draws), "cpu", pinned=pinned)
        host.fill(draws)
        if torch.device(device).type == "cpu":
            return host
        there = cls.allocate(len(draws), device)
        there.copy_from(host)
        return there

    def fill(self, draws: Sequence[TokenDraw]) -> None:
        """Write ``draws`` to the first rows, and greedy ones to the rest. For tensors on the host.

        Raises:
            ValueError: more draws than rows.
        """
        rows = self.uniform.shape[0]
        if len(draws) > rows:
            raise ValueError(f"{len(draws)} draws do not fit {rows} rows; allocate as many as the largest batch has")
        padded = [*draws, *[GREEDY] * (rows - len(draws))]
        for name in ("uniform", "top_p", "temperature", "min_p", "top_k"):
            field: Tensor = getattr(self, name)
            field.copy_(torch.tensor([getattr(draw, name) for draw in padded], dtype=field.dtype))

    def copy_from(self, other: "DrawTensors") -> None:
        """Take over the draws of ``other``, which has as many rows, without waiting where it lies in pinned memory."""
        self.packed.copy_(other.packed, non_blocking=True)

    def first(self, rows: int) -> "DrawTensors":
        """The first ``rows`` of them, in the same memory."""
        return DrawTensors(
            self.uniform[:rows], self.top_p[:rows], self.temperature[:rows], self.min_p[:rows], self.top_k[:rows], self.packed
        )

    def tolist(self) -> list[TokenDraw]:
        """Back to records; waits for the device."""
        columns = (self.uniform, self.temperature, self.top_k, self.top_p, self.min_p)
        return [TokenDraw(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
