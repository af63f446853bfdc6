"""The argmax of the CPU kernels agrees with torch's, NaN and ties included, on rows of any length and stride."""

import pytest
import torch
from cpu_models import need_cpu_kernels
from torch import Tensor

from minivllm_kernels.cpu.ops import argmax

SIZES = (1, 2, 15, 16, 17, 33, 101, 1000, 49152)


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    need_cpu_kernels()


def rows(count: int, size: int, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def naive(row: Tensor) -> int:
    """The first NaN, else the first of the largest."""
    nan = row.isnan().nonzero()
    return int(nan[0]) if len(nan) else int((row == row.max()).nonzero()[0])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 3, 8, 33])
def test_random_rows(size: int, count: int) -> None:
    logits = rows(count, size)
    assert argmax(logits).tolist() == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("size", SIZES[:-1])
def test_every_place_can_win_and_the_first_of_equals_does(size: int) -> None:
    for place in {0, size // 2, max(0, size - 2), size - 1}:
        row = rows(1, size).clamp(max=3.0)
        row[0, place] = 4.0
        assert argmax(row).item() == place
        row[0, place:] = 4.0
        assert argmax(row).item() == place
        row[0, place] = torch.inf
        assert argmax(row).item() == place


@pytest.mark.parametrize("size", SIZES[:-1])
def test_a_nan_is_the_largest(size: int) -> None:
    for place in {0, size // 2, size - 1}:
        row = rows(2, size)
        row[0, place] = torch.nan
        row[0, 0] = row[0, 0] if place == 0 else torch.inf
        assert argmax(row).tolist() == [place, naive(row[1])]
    assert argmax(torch.full((1, size), torch.nan)).item() == 0


def test_zeros_of_either_sign_and_nothing_but_minus_infinity() -> None:
    signed = torch.full((2, 40), -1.0)
    signed[0, 7], signed[0, 21] = -0.0, 0.0
    signed[1, 7], signed[1, 21] = 0.0, -0.0
    assert argmax(signed).tolist() == [7, 7]
    assert argmax(torch.full((1, 40), -torch.inf)).item() == 0
    assert argmax(torch.full((1, 40), -3.4e38)).item() == 0


def test_strides_and_other_types() -> None:
    wide = rows(5, 128)
    assert argmax(wide[:, :101]).tolist() == wide[:, :101].argmax(-1).tolist()
    assert argmax(wide[::2, 3:77]).tolist() == wide[::2, 3:77].argmax(-1).tolist()
    assert argmax(wide.T).tolist() == wide.T.argmax(-1).tolist()
    assert argmax(wide.double()).tolist() == wide.argmax(-1).tolist()
    assert argmax(torch.empty(0, 10)).tolist() == []
