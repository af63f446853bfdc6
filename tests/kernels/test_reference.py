"""The pointwise ops of the reference backend against its formula written as a plain loop, in float64 where it can be."""

import math

import pytest
import torch
from torch import Tensor

import minivllm_kernels as kernels

# (query heads, key heads, head size): none a power of two where the kernels of others assume one.
SHAPES = [(9, 3, 64), (4, 1, 80), (6, 2, 96), (4, 1, 256), (5, 5, 6)]
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def close(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert got.dtype == dtype
    tolerance = DTYPES[dtype]
    torch.testing.assert_close(got.double(), expected.double(), atol=tolerance, rtol=tolerance)


# Pointwise ops


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (3, 576), (2, 4, 80)])
def test_rms_norm(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    rows = [
        [v / math.sqrt(sum(u * u for u in row) / len(row) + 1e-3) for v in row] for row in x.double().view(-1, shape[-1]).tolist()
    ]
    close(kernels.rms_norm(x, weight, 1e-3), torch.tensor(rows).view(shape) * weight.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_returns_the_norm_and_the_sum_and_writes_neither_input(dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(3, 50).to(dtype), torch.randn(3, 50).to(dtype), torch.randn(50).to(dtype)
    before = x.clone(), residual.clone()
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, kernels.rms_norm(x + residual, weight, 1e-6))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_rms_norm_squares_in_float32() -> None:
    """300 squared is beyond float16."""
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    assert torch.equal(kernels.rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones(1, 8, dtype=torch.float16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    gate_up = torch.randn(3, 2 * 13).to(dtype)
    gate, up = gate_up[:, :13].double(), gate_up[:, 13:].double()
    close(kernels.silu_and_mul(gate_up), gate / (1 + torch.exp(-gate)) * up, dtype)


def test_linear_and_embedding() -> None:
    x, weight, bias = torch.randn(5, 7), torch.randn(11, 7), torch.randn(11)
    expected = torch.tensor([[sum(a * b for a, b in zip(row, w, strict=True)) for w in weight.tolist()] for row in x.tolist()])
    close(kernels.linear(x, weight), expected)
    close(kernels.linear(x, weight, bias), expected + bias)
    assert torch.equal(kernels.embedding(torch.tensor([3, 3, 0]), weight), torch.stack([weight[3], weight[3], weight[0]]))


def test_argmax_takes_the_lowest_index_of_a_tie() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0], [-1.0, -1.0, -1.0], [1.0, 0.0, 3.0]])
    assert kernels.argmax(logits).tolist() == [1, 0, 2]
    wide = torch.zeros(2, 49153)
    wide[0, 40000:40100] = 1.0
    assert kernels.argmax(wide).tolist() == [40000, 0]


# Rotary


def table(positions: int, dim: int, theta: float = 10000.0) -> Tensor:
    angles = [[p * theta ** (-2 * i / dim) for i in range(dim // 2)] for p in range(positions)]
    return torch.tensor([[math.cos(a) for a in row] + [math.sin(a) for a in row] for row in angles])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rotary(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    heads, kv_heads, dim = shape
    positions = torch.tensor([0, 1, 37, 5, 5])
    q, k = torch.randn(5, heads, dim).to(dtype), torch.randn(5, kv_heads, dim).to(dtype)
    got = kernels.rotary(q, k, positions, table(40, dim))
    for x, out in zip((q, k), got, strict=True):
        pairs = torch.complex(x[..., : dim // 2].double(), x[..., dim // 2 :].double())
        turns = torch.tensor([[p * 10000.0 ** (-2 * i / dim) for i in range(dim // 2)] for p in positions.tolist()]).double()
        turned = pairs * torch.exp(1j * turns).unsqueeze(1)
        close(out, torch.cat((turned.real, turned.imag), dim=-1), dtype)


@pytest.mark.parametrize("normed", [False, True])
def test_norm_rotary_store_is_its_three_parts(normed: bool) -> None:
    torch.manual_seed(3)
    q, k, v = torch.randn(5, 6, 16), torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    weights = (torch.rand(16), torch.rand(16)) if normed else (None, None)
    positions, cos_sin = torch.tensor([0, 1, 2, 9, 4]), torch.rand(10, 16)
    slots = torch.tensor([7, 8, -1, 2, 0])
    caches = torch.full((2, 3, 4, 2, 16), torch.nan)
    got = kernels.norm_rotary_store(q, k, v, positions, cos_sin, caches[0], caches[1], slots, *weights, 1e-5)
    if normed:
        q, k = kernels.rms_norm(q, weights[0], 1e-5), kernels.rms_norm(k, weights[1], 1e-5)
    q, k = kernels.rotary(q, k, positions, cos_sin)
    assert torch.equal(got, q)
    written = caches.view(2, 12, 2, 16)
    live = slots >= 0
    assert torch.equal(written[0, slots[live]], k[live])
    assert torch.equal(written[1, slots[live]], v[live])
    assert written.isnan().any(dim=-1).any(dim=-1).sum() == 2 * (12 - 4)
