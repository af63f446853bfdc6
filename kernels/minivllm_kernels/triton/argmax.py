"""The most likely token of each row of logits ``[S, V]``, and its logit.

Reads each row once, which is the floor: 156 MB for 256 rows of 151,936 float32, 600 KB for one. A row is split over as many
programs as fill the device, each of which takes a run of blocks; a second launch takes the best of each row's parts. Value and
index are compared as one 64-bit number: the value's bits, turned so that integers order as floats do, above the index counted
from the end. So the lowest index wins a tie, and the result does not depend on the split.

A NaN counts as the largest, as in torch: a row that has one shows it in its peak, and nobody needs to look at the row again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm_kernels.triton.compilation import CompileCase
from minivllm_kernels.triton.launch import COMPILER_OPTIONS, check_floats, check_rows, next_power_of_2

__all__ = [
    "COMPILE_CASES",
    "argmax",
    "argmax_and_peak",
    "best_of",
    "check_logits",
    "key_value",
    "ordered_key",
    "packed_peaks",
    "split",
]

MAX_BLOCK = 2048
NUM_WARPS = 8
PROGRAMS = 512
"""A row is split until so many programs run: four for each processor of an H100 or H200."""

LOWEST = tl.constexpr(-(2**31))  # below the key of -inf: of what is no column


def argmax(logits: Tensor) -> Tensor:
    """See :func:`minivllm_kernels.argmax`. Rows may be strided.

    Raises:
        ValueError: not two-dimensional, no columns, not float32, bfloat16 or float16, or strided columns.
    """
    return argmax_and_peak(logits)[0]


def argmax_and_peak(logits: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`argmax` ``[S]`` int64, and the values there ``[S]`` float32: not finite where the row has no most likely token."""
    check_logits("argmax", logits)
    rows = logits.shape[0]
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    peaks = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        packed = packed_peaks(logits)
        parts = packed.shape[1]
        _best_kernel[(rows,)](
            packed, tokens, peaks, parts, PARTS=next_power_of_2(parts), num_warps=1, num_stages=1, **COMPILER_OPTIONS
        )
    return tokens, peaks


def check_logits(op: str, logits: Tensor) -> None:
    """A ValueError for what the kernels over rows of logits do not take."""
    if logits.dim() != 2 or logits.shape[1] == 0:
        raise ValueError(f"{op}: logits must be [S, V] with at least one column, got {list(logits.shape)}")
    check_floats(op, logits=logits)
    check_rows(op, logits=logits)


def split(rows: int, width: int) -> tuple[int, int, int]:
    """Columns of a block, columns of a part (some blocks), parts of a row."""
    block = min(next_power_of_2(width), MAX_BLOCK)
    blocks = triton.cdiv(width, block)
    each = triton.cdiv(blocks, min(blocks, triton.cdiv(PROGRAMS, rows)))
    return block, each * block, triton.cdiv(blocks, each)


def packed_peaks(logits: Tensor) -> Tensor:
    """The best of every part of every row, ``[S, parts]`` int64: :func:`ordered_key` above ``2**31 - 1 - index``."""
    rows, width = logits.shape
    block, columns, parts = split(rows, width)
    packed = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    _peaks_kernel[(rows, parts)](
        logits, packed, width, logits.stride(0), columns, BLOCK=block, num_warps=NUM_WARPS, num_stages=1, **COMPILER_OPTIONS
    )
    return packed


@triton.jit
def ordered_key(x):
    """float32 -> int32 in the same order: both zeros alike, a NaN above everything."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, key)


@triton.jit
def key_value(key):
    """The float32 of an :func:`ordered_key`."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def best_of(packed, row, parts, PARTS: tl.constexpr):  # noqa: N803
    """Key and index of the best of a row."""
    part = tl.arange(0, PARTS)
    best = tl.max(tl.load(packed + row * parts + part, mask=part < parts, other=-(2**63)), axis=0)
    return (best >> 32).to(tl.int32), (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _peaks_kernel(logits, packed, width, row_stride, columns, BLOCK: tl.constexpr):  # noqa: N803
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full([BLOCK], LOWEST, tl.int32)
    place = tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        column = part * columns + start + tl.arange(0, BLOCK)
        inside = column < width
        x = tl.load(logits + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
        key = tl.where(inside, ordered_key(x), LOWEST)
        better = key > best  # a lane's columns come in their order: an equal one does not replace the first
        best = tl.where(better, key, best)
        place = tl.where(better, column, place)
    both = (best.to(tl.int64) << 32) | (0x7FFFFFFF - place).to(tl.int64)
    tl.store(packed + row * tl.num_programs(1) + part, tl.max(both, axis=0))


@triton.jit
def _best_kernel(packed, tokens, peaks, parts, PARTS: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    key, index = best_of(packed, row, parts, PARTS)
    tl.store(tokens + row, index)
    tl.store(peaks + row, key_value(key))


COMPILE_CASES = (
    *(
        CompileCase(
            name=f"argmax parts {dtype}",
            kernel=_peaks_kernel,
            signature={"logits": f"*{dtype}", "packed": "*i64", "width": "i32:16", "row_stride": stride, "columns": "i32:16"},
            constexprs={"BLOCK": MAX_BLOCK},
            num_warps=NUM_WARPS,
            num_stages=1,
        )
        for dtype, stride in (("fp32", "i32:16"), ("bf16", "i32:16"), ("fp16", "i32"))
    ),
    *(
        CompileCase(
            name=f"argmax best of {parts}",
            kernel=_best_kernel,
            signature={"packed": "*i64", "tokens": "*i64", "peaks": "*fp32", "parts": kind},
            constexprs={"PARTS": parts},
            num_warps=1,
            num_stages=1,
        )
        for parts, kind in ((1, "i32:1"), (128, "i32"))
    ),
)
