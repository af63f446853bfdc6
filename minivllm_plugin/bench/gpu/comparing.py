"""One kernel against the reference, on the same tensors: what differs, and by how much it may. Checks never end the part."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minivllm_plugin.bench.gpu.records import Recorder

__all__ = ["Comparison", "comparing"]

# Kernel and reference round at the same places: the last place of a dtype, or more where sums are in another order.
LAST_PLACE = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


class Comparison:
    """The tensors of one case, and the greatest excess over what is allowed."""

    def __init__(self) -> None:
        self.worst = 0.0  # of what is allowed: above 1 is wrong
        self.problems: list[str] = []

    def close(self, name: str, got: Tensor, expected: Tensor, *, times: float = 1.0, of_row: bool = False) -> None:
        """``got`` is ``expected`` to within ``times`` the last place of its dtype, and NaN where that is.

        Args:
            of_row: the last place of the largest number in the row, where each result mixes several.
        """
        if got.shape != expected.shape or got.dtype != expected.dtype:
            self.problems.append(f"{name} is {got.dtype} {list(got.shape)}, not {expected.dtype} {list(expected.shape)}")
            return
        allowed = LAST_PLACE[got.dtype] * times
        got, expected = got.double(), expected.double()
        if not torch.equal(got.isnan(), expected.isnan()):
            self.problems.append(f"{name} has NaN where the reference has none, or the other way round")
            return
        sizes = expected.abs().nan_to_num(0.0)
        if of_row and sizes.numel():
            sizes = sizes.amax(dim=-1, keepdim=True)
        excess = ((got - expected).abs() / (allowed * (0.25 + sizes))).nan_to_num(0.0)
        worst = float(excess.max()) if excess.numel() else 0.0
        self.worst = max(self.worst, worst)
        if worst > 1:
            self.problems.append(f"{name} is off by {worst:.3g} times what is allowed")

    def same(self, name: str, got: Tensor, expected: Tensor, *, but: int = 0) -> None:
        """Equal to the bit, NaN included, in all places ``but`` so many."""
        if got.shape != expected.shape:
            self.problems.append(f"{name} is {list(got.shape)}, not {list(expected.shape)}")
            return
        different = int(((got != expected) & ~((got != got) & (expected != expected))).sum())
        if different > but:
            self.problems.append(f"{name} differ in {different} of {got.numel()} places")


@contextmanager
def comparing(record: Recorder, name: str) -> Iterator[Comparison]:
    """One check called ``name``: passed if nothing differs and nothing is raised."""
    comparison = Comparison()
    try:
        yield comparison
    except Exception as error:  # a kernel that cannot be compiled or launched is what this looks for
        comparison.problems.append(f"{type(error).__name__}: {error!s:.300}")
    record.check(name, not comparison.problems, "; ".join(comparison.problems) or f"{comparison.worst:.2f} of what is allowed")
