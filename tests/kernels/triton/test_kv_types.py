"""8-bit floats of the cache, by bits: every code is read exactly, and every number stored as torch rounds it, or saturated."""

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm_kernels.triton.kv_types import FLOAT8, as_stored, check_scale, narrow, widen

KINDS = [(torch.float8_e4m3fn, "e4m3"), (torch.float8_e4m3fn, "e4m3_hardware"), (torch.float8_e5m2, "e5m2")]


@triton.jit
def _read(x, y, FORMAT: tl.constexpr):  # noqa: N803
    o = tl.arange(0, 256)
    tl.store(y + o, widen(tl.load(x + o), FORMAT).to(tl.float32))


@triton.jit
def _write(x, y, FORMAT: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + o, narrow(tl.load(x + o), y.dtype.element_ty, FORMAT))


@pytest.mark.parametrize(("dtype", "kind"), KINDS)
def test_every_finite_code_is_read_exactly(dtype: torch.dtype, kind: str) -> None:
    codes, got = torch.arange(256).to(torch.uint8), torch.empty(256)
    _read[(1,)](codes, got, kind)
    expected = codes.view(dtype).float()
    finite = expected.isfinite()
    assert finite.sum() >= 248
    assert torch.equal(got[finite], expected[finite])
    assert torch.equal(got.signbit(), expected.signbit()) or kind == "e5m2"  # of NaN too, where there are bits for it


def numbers(dtype: torch.dtype) -> Tensor:
    """All values of ``dtype``, all midpoints between neighbours and what is just beside them, and any float32 there is."""
    codes = torch.arange(256).to(torch.uint8).view(dtype).float()
    values = codes[codes.isfinite()].sort().values
    ties = (values[1:] + values[:-1]) / 2
    beside = [torch.nextafter(ties, torch.full_like(ties, towards)) for towards in (-torch.inf, torch.inf)]
    anything = torch.randint(-(2**31), 2**31, (2**16,)).to(torch.int32).view(torch.float32)
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e9, -1e9])
    return torch.cat((values, ties, *beside, anything, special))


@pytest.mark.parametrize(("dtype", "kind"), KINDS)
def test_numbers_are_rounded_as_torch_rounds_them_and_saturate(dtype: torch.dtype, kind: str) -> None:
    x = numbers(dtype)
    x = torch.cat((x, x.new_zeros(-x.shape[0] % 4096)))
    got = torch.empty(x.shape, dtype=torch.uint8)
    _write[(x.shape[0] // 4096,)](x, got, kind, 4096)
    largest = torch.finfo(dtype).max
    expected = x.clamp(-largest, largest).to(dtype).view(torch.uint8)
    number = ~x.isnan()
    assert torch.equal(got[number], expected[number])
    assert got[~number].view(dtype).float().isnan().all()


def test_other_types_pass_as_they_are() -> None:
    cache = torch.zeros(1, 2, 3, 4, dtype=torch.bfloat16)
    stored, found = as_stored("op", cache)
    assert stored is cache
    assert found == "plain"
    for dtype, kind in FLOAT8.items():
        stored, found = as_stored("op", cache.to(dtype))
        assert (stored.dtype, stored.shape, found) == (torch.uint8, cache.shape, kind)


def test_what_no_kernel_reads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"op: a cache of torch\.float64; keys and values are stored as bfloat16"):
        as_stored("op", torch.zeros(1, dtype=torch.float64))
    for scale in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=r"op: k_scale=.*must be positive and finite"):
            check_scale("op", "k_scale", scale)
