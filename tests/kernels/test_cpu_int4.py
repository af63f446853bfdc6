"""int4 weights: GGUF's Q4_1 kept exactly, the product against an emulation, rows on their own, and a whole decoder."""

import ctypes

import pytest
import torch
from torch import Tensor

from minivllm_kernels.cpu.packing import PackedMatrix, pack_matrix
from minivllm_kernels.dispatch import why_not

pytestmark = pytest.mark.skipif(why_not("cpu", "cpu") is not None, reason="no compiler here")

SHAPES = [(32, 32), (64, 64), (96, 100), (577, 576), (40, 1)]


def q4_1(channels: int, depth: int, seed: int = 0) -> Tensor:
    """Weights as a Q4_1 file holds them: half-float step and least value per 32, the values 0 and 15 both taken."""
    random = torch.Generator().manual_seed(seed)
    groups = -(-depth // 32)
    step = (torch.rand(channels, groups, generator=random) * 0.02 + 0.001).half().float()
    least = (torch.randn(channels, groups, generator=random) * 0.05).half().float()
    values = torch.randint(0, 16, (channels, groups, 32), generator=random).float()
    values[..., 0], values[..., -1] = 0, 15
    return (values * step.unsqueeze(-1) + least.unsqueeze(-1)).view(channels, -1)[:, :depth]


def product(matrix: PackedMatrix, x: Tensor) -> Tensor:
    from minivllm_kernels.cpu.library import kernel_library

    x, out, struct = x.contiguous(), torch.full((x.shape[0], matrix.channels), torch.nan), matrix.struct()
    kernel_library().minivllm_linear(ctypes.byref(struct), x.data_ptr(), x.shape[0], x.shape[1], out.data_ptr(), 0, 2)
    return out


def quantised(x: Tensor) -> Tensor:
    """What the kernel makes of activations: bytes with one scale per 32 values."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).double().view(x.shape[0], -1, 32)
    scale = padded.abs().amax(dim=-1, keepdim=True) / 127
    return ((padded / scale.clamp(min=1e-30)).round() * scale).view(x.shape[0], -1)[:, : x.shape[1]]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_equals_its_emulation(shape: tuple[int, int]) -> None:
    matrix = pack_matrix(q4_1(*shape), "int4")
    # What is stored, read back column by column: where 32 does not divide the depth it is not what went in to the last bit.
    weight = (product(matrix, torch.eye(shape[1]) * 127.0) / 127.0).T[: shape[0]]
    assert (weight - q4_1(*shape)).abs().max() < 0.02
    for rows in (1, 3, 4, 5, 37):
        x = torch.randn(rows, shape[1], generator=torch.Generator().manual_seed(rows))
        expected = quantised(x) @ weight.double().T
        got = product(matrix, x)[:, : shape[0]].double()
        assert (got - expected).abs().max() <= 2e-3 * expected.abs().max()  # rounding of a half-way byte, here and there
        assert (got - expected).pow(2).mean().sqrt() <= 2e-4 * expected.pow(2).mean().sqrt() + 1e-9


def test_the_weights_of_a_q4_1_file_are_kept_exactly() -> None:
    weight = q4_1(64, 96)
    matrix = pack_matrix(weight, "int4")
    one = torch.zeros(1, 96)
    for k in range(96):
        one.zero_()
        one[0, k] = 127.0  # a byte of 127 and a scale of 1: nothing is rounded
        got = product(matrix, one)[0, :64] / 127.0
        torch.testing.assert_close(got, weight[:, k], rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("rows", [2, 4, 5, 9, 32, 65])
def test_a_row_is_the_same_bits_alone(rows: int) -> None:
    matrix = pack_matrix(q4_1(96, 160, seed=1), "int4", torch.randn(96))
    x = torch.randn(rows, 160, generator=torch.Generator().manual_seed(2))
    together = product(matrix, x)
    for row in range(rows):
        assert torch.equal(product(matrix, x[row : row + 1])[0], together[row])


def test_zero_weights_and_zero_rows() -> None:
    matrix = pack_matrix(torch.zeros(32, 64), "int4")
    assert torch.equal(product(matrix, torch.randn(3, 64)), torch.zeros(3, 32))
    assert torch.equal(product(pack_matrix(q4_1(32, 64), "int4"), torch.zeros(2, 64)), torch.zeros(2, 32))
