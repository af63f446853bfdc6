"""Root-mean-square norm of rows, alone and with the residual addition before it: one kernel, one pass over memory.

``rms_norm`` reads x and writes the result, ``2 * T * C`` elements; ``add_rms_norm`` reads two and writes two, ``4 * T * C``. A
program takes one row and keeps it in registers up to 16384 columns, eight elements a thread as long as 16 warps reach; wider
rows are read twice, in blocks. Sums are float32, in an order that depends on C alone, so a row never depends on its company. No
autotuning: the number of warps follows from the width, and the time from the bytes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm_kernels.triton.compilation import CompileCase
from minivllm_kernels.triton.launch import COMPILER_OPTIONS, check_floats, check_rows, next_power_of_2

__all__ = ["COMPILE_CASES", "add_rms_norm", "rms_norm"]

MAX_BLOCK = 16384
ELEMENTS_A_WARP = 32 * 8
MAX_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See :func:`minivllm_kernels.rms_norm`; ``x [T, C]`` or ``[T, H, C]``, whose leading dimensions may be strided.

    Raises:
        ValueError: other shapes, more than one dtype or none of the 16- and 32-bit floats, or strided columns.
    """
    _check("rms_norm", weight, x=x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, x, weight, eps, x, out, add=False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See :func:`minivllm_kernels.add_rms_norm`: the sum is rounded to the dtype before it is normed.

    Raises:
        ValueError: as for :func:`rms_norm`, or x and residual differ in shape.
    """
    _check("add_rms_norm", weight, x=x, residual=residual)
    if x.dim() != 2 or x.shape != residual.shape:
        raise ValueError(f"add_rms_norm: x and residual must be [T, C] both, got {list(x.shape)} and {list(residual.shape)}")
    out, total = torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, residual, weight, eps, total, out, add=True)
    return out, total


def _check(op: str, weight: Tensor, **rows: Tensor) -> None:
    check_floats(op, **rows, weight=weight)
    check_rows(op, **rows, weight=weight)
    for name, tensor in rows.items():
        if tensor.dim() not in (2, 3) or weight.shape != tensor.shape[-1:]:
            raise ValueError(
                f"{op}: {name} must be [T, C] or [T, H, C] and weight [C], got {list(tensor.shape)} and {list(weight.shape)}"
            )


def _launch(x: Tensor, residual: Tensor, weight: Tensor, eps: float, total: Tensor, out: Tensor, *, add: bool) -> None:
    width = x.shape[-1]
    if out.numel() == 0:
        return
    heads, head_stride = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    block = min(next_power_of_2(width), MAX_BLOCK)
    _rms_norm_kernel[(out.numel() // width,)](
        x,
        residual,
        weight,
        total,
        out,
        width,
        heads,
        x.stride(0),
        head_stride,
        residual.stride(0),
        eps,
        ADD=add,
        BLOCK=block,
        WHOLE=width <= block,
        num_warps=_warps(block),
        num_stages=1,
        **COMPILER_OPTIONS,
    )


def _warps(block: int) -> int:
    return min(max(block // ELEMENTS_A_WARP, 1), MAX_WARPS)


@triton.jit
def _rms_norm_kernel(
    x,
    residual,
    weight,
    total,
    out,
    width,
    heads,
    x_stride,
    head_stride,
    residual_stride,
    eps,
    ADD: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    WHOLE: tl.constexpr,  # noqa: N803
):
    row = tl.program_id(0).to(tl.int64)
    x += (row // heads) * x_stride + (row % heads) * head_stride
    residual += row * residual_stride
    total += row * width
    out += row * width
    columns = tl.arange(0, BLOCK)
    if WHOLE:
        inside = columns < width
        wide = _load(x, residual, columns, inside, ADD)
        if ADD:
            tl.store(total + columns, wide.to(total.dtype.element_ty), mask=inside)
        scale = tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
        _store(out, weight, wide * scale, columns, inside)
    else:
        squares = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, width, BLOCK):
            inside = start + columns < width
            wide = _load(x, residual, start + columns, inside, ADD)
            if ADD:
                tl.store(total + start + columns, wide.to(total.dtype.element_ty), mask=inside)
            squares += wide * wide
        scale = tl.rsqrt(tl.sum(squares, 0) / width + eps)
        for start in range(0, width, BLOCK):
            inside = start + columns < width
            # Added again, not read back: nothing says that the thread which reads a sum is the one which wrote it.
            wide = _load(x, residual, start + columns, inside, ADD)
            _store(out, weight, wide * scale, start + columns, inside)


@triton.jit
def _load(x, residual, columns, inside, ADD: tl.constexpr):  # noqa: N803
    """A piece of the row, or of the sum rounded to the dtype of the tensors, as float32."""
    wide = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + columns, mask=inside, other=0.0).to(tl.float32)
        wide = wide.to(x.dtype.element_ty).to(tl.float32)
    return wide


@triton.jit
def _store(out, weight, normed, columns, inside):
    dtype: tl.constexpr = out.dtype.element_ty
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    # Rounded before the weight is multiplied in, as the reference is.
    tl.store(out + columns, (normed.to(dtype).to(tl.float32) * w).to(dtype), mask=inside)


def _case(dtype: str, add: bool, block: int, whole: bool = True) -> CompileCase:
    pointers = dict.fromkeys(("x", "residual", "weight", "total", "out"), f"*{dtype}")
    return CompileCase(
        name=f"{'add_' if add else ''}rms_norm {dtype} {block}{'' if whole else ' in blocks'}",
        kernel=_rms_norm_kernel,
        signature={
            **pointers,
            "width": "i32:16",
            "heads": "i32:1",
            "x_stride": "i32:16",
            "head_stride": "i32:16",
            "residual_stride": "i32:16",
            "eps": "fp32",
        },
        constexprs={"ADD": add, "BLOCK": block, "WHOLE": whole},
        num_warps=_warps(block),
        num_stages=1,
    )


COMPILE_CASES = (
    _case("bf16", False, 1024),
    _case("bf16", True, 1024),
    _case("fp16", True, 4096),
    _case("fp32", True, 16384),
    _case("bf16", True, 16384, whole=False),
)
