"""The pointwise kernels, interpreted, against the reference over odd shapes, dtypes and strides (trials J03)."""

import numpy as np
import pytest
import torch
from torch import Tensor

from minivllm_kernels import reference
from minivllm_kernels.triton import rms_norm as rms_norm_file
from minivllm_kernels.triton.launch import next_power_of_2
from minivllm_kernels.triton.rms_norm import add_rms_norm, rms_norm
from minivllm_kernels.triton.rotary import rotary
from minivllm_kernels.triton.silu_and_mul import silu_and_mul

# Both round at the same places, so what differs is the exponential and the order of a sum: one unit in the last place.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = list(TOLERANCES)
HEADS = [(9, 3, 64), (4, 1, 80), (6, 2, 96), (4, 1, 256), (5, 5, 6), (3, 3, 16)]


def close(got: Tensor, expected: Tensor) -> None:
    """Same dtype and shape, and the same values to the last place of the dtype."""
    assert got.dtype == expected.dtype
    assert got.is_contiguous()
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance / 4, rtol=tolerance)


def strided(rows: int, width: int, dtype: torch.dtype, before: int = 3, after: int = 5) -> Tensor:
    """Random ``[rows, width]``, a view of wider rows whose other columns are NaN."""
    whole = torch.full((rows, before + width + after), torch.nan, dtype=dtype)
    whole[:, before : before + width] = torch.randn(rows, width) * 4
    return whole[:, before : before + width]


def test_next_power_of_2() -> None:
    assert [next_power_of_2(size) for size in (0, 1, 2, 3, 64, 65, 576)] == [1, 1, 2, 4, 64, 128, 1024]


# SiLU


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 13), (2, 1000), (1, 3072), (0, 8), (2, 0)])
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = strided(rows, 2 * width, dtype)
    close(silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


def test_silu_of_extremes_is_no_nan() -> None:
    """exp overflows to infinity for -100, and underflows for 100."""
    gate_up = torch.tensor([[-100.0, 100.0, -0.0, 2.0, 2.0, 2.0]])
    with np.errstate(over="ignore"):
        close(silu_and_mul(gate_up), reference.silu_and_mul(gate_up))


# Norms


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (2, 576), (2, 1000), (1, 16384), (0, 8)])
def test_rms_norm_and_its_sum(rows: int, width: int, dtype: torch.dtype) -> None:
    x, residual, weight = strided(rows, width, dtype), strided(rows, width, dtype, 1, 0), torch.randn(width).to(dtype)
    close(rms_norm(x, weight, 1e-3), reference.rms_norm(x, weight, 1e-3))
    before = x.clone(), residual.clone()
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    expected, expected_total = reference.add_rms_norm(x, residual, weight, 1e-6)
    close(normed, expected)
    assert torch.equal(total, expected_total)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("width", [65, 128, 200])
def test_rows_wider_than_a_block_are_normed_in_pieces(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rms_norm_file, "MAX_BLOCK", 64)
    x, residual, weight = strided(3, width, torch.bfloat16), strided(3, width, torch.bfloat16), torch.randn(width).bfloat16()
    close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    normed, total = add_rms_norm(x, residual, weight, 1e-6)
    close(normed, reference.rms_norm(x + residual, weight, 1e-6))
    assert torch.equal(total, x + residual)


def test_rms_norm_of_heads_inside_a_projection() -> None:
    x, weight = strided(3, 4 * 24, torch.float32).unflatten(1, (4, 24)), torch.randn(24)
    close(rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))


def test_rms_norm_squares_in_float32() -> None:
    """300 squared is beyond float16."""
    x = torch.full((1, 8), 300.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(8, dtype=torch.float16), 1e-6), torch.ones(1, 8, dtype=torch.float16))


# Rotary


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("q_heads", "k_heads", "head_dim"), HEADS)
def test_rotary(q_heads: int, k_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    tokens = 2
    q = strided(tokens, q_heads * head_dim, dtype).unflatten(1, (q_heads, head_dim))
    k = strided(tokens, k_heads * head_dim, dtype).unflatten(1, (k_heads, head_dim))
    cos_sin, positions = torch.randn(30, head_dim), torch.tensor([29, 0])
    for got, expected in zip(rotary(q, k, positions, cos_sin), reference.rotary(q, k, positions, cos_sin), strict=True):
        close(got, expected)


def test_rotary_of_nothing() -> None:
    q, k = rotary(torch.empty(0, 3, 8), torch.empty(0, 1, 8), torch.empty(0, dtype=torch.int64), torch.randn(4, 8))
    assert q.shape == (0, 3, 8)
    assert k.shape == (0, 1, 8)


# What a caller may get wrong


def test_what_the_kernels_do_not_take_is_refused_by_name() -> None:
    x, weight, table, position = torch.randn(2, 8), torch.randn(8), torch.randn(4, 8), torch.zeros(2, dtype=torch.int64)
    q, k = torch.randn(2, 3, 8), torch.randn(2, 1, 8)
    with pytest.raises(ValueError, match=r"silu_and_mul: gate_up must be \[T, 2 \* I\], got \[2, 7\]"):
        silu_and_mul(x[:, :7])
    with pytest.raises(ValueError, match=r"silu_and_mul: gate_up torch.float64; the kernel takes one dtype out of"):
        silu_and_mul(x.double())
    with pytest.raises(ValueError, match=r"gate_up has strides \(1, 2\); the last must be 1"):
        silu_and_mul(torch.randn(8, 2).T)
    with pytest.raises(ValueError, match=r"rms_norm: x torch.float32, weight torch.bfloat16"):
        rms_norm(x, weight.bfloat16(), 1e-6)
    with pytest.raises(ValueError, match=r"rms_norm: x must be .* got \[2, 8\] and \[7\]"):
        rms_norm(x, weight[:7], 1e-6)
    with pytest.raises(ValueError, match=r"must be \[T, C\] both, got \[2, 8\] and \[1, 8\]"):
        add_rms_norm(x, x[:1], weight, 1e-6)
    with pytest.raises(ValueError, match=r"rotary: q must be \[T, H, D\] and k \[T, K, D\]"):
        rotary(q, k[:1], position, table)
    with pytest.raises(ValueError, match="rotary: a head of 7; rotation pairs dimensions"):
        rotary(q[..., :7], k[..., :7], position, table)
    with pytest.raises(ValueError, match=r"rotary: a head of 258; .* up to 256"):
        rotary(torch.randn(2, 1, 258), torch.randn(2, 1, 258), position, torch.randn(4, 258))
    with pytest.raises(ValueError, match=r"positions must be int64 \[2\], got torch.int32 \[2\]"):
        rotary(q, k, position.int(), table)
    with pytest.raises(ValueError, match=r"cos_sin must be float32 \[positions, 8\], got torch.bfloat16 \[4, 8\]"):
        rotary(q, k, position, table.bfloat16())
