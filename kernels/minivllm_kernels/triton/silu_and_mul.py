"""The gate of the MLP: ``[T, 2 * I] -> silu(first half) * second half [T, I]``.

Moves ``3 * T * I`` elements and computes next to nothing: a program takes one row and up to 1024 columns, eight a thread in
16-byte loads. No autotuning: loads are as wide as they get, and every further block is compiled when a server starts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm_kernels.triton.compilation import CompileCase
from minivllm_kernels.triton.launch import COMPILER_OPTIONS, check_floats, check_rows, next_power_of_2

__all__ = ["COMPILE_CASES", "silu_and_mul"]

MAX_BLOCK = 1024
ELEMENTS_A_WARP = 32 * 8


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See :func:`minivllm_kernels.silu_and_mul`. Rows may be strided.

    Raises:
        ValueError: not two-dimensional, an odd width, a dtype that is no float of 16 or 32 bits, or strided columns.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2:
        raise ValueError(f"silu_and_mul: gate_up must be [T, 2 * I], got {list(gate_up.shape)}")
    check_floats("silu_and_mul", gate_up=gate_up)
    check_rows("silu_and_mul", gate_up=gate_up)
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    block = min(next_power_of_2(width), MAX_BLOCK)
    grid = (rows, triton.cdiv(width, block))
    _silu_and_mul_kernel[grid](
        gate_up, out, width, gate_up.stride(0), BLOCK=block, num_warps=_warps(block), num_stages=1, **COMPILER_OPTIONS
    )
    return out


def _warps(block: int) -> int:
    return max(block // ELEMENTS_A_WARP, 1)


@triton.jit
def _silu_and_mul_kernel(gate_up, out, width, row_stride, BLOCK: tl.constexpr):  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    first = gate_up + row * row_stride + columns
    gate = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(first + width, mask=inside, other=0.0).to(tl.float32)
    # Rounded between the two steps, as the reference is.
    activated = (gate / (1.0 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + columns, (activated * up).to(out.dtype.element_ty), mask=inside)


COMPILE_CASES = tuple(
    CompileCase(
        name=f"silu_and_mul {dtype} {block}",
        kernel=_silu_and_mul_kernel,
        signature={"gate_up": f"*{dtype}", "out": f"*{dtype}", "width": "i32:16", "row_stride": "i32:16"},
        constexprs={"BLOCK": block},
        num_warps=_warps(block),
        num_stages=1,
    )
    for dtype, block in (("bf16", 1024), ("fp16", 512), ("fp32", 1024))
)
