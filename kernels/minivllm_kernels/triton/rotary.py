"""Rotary positions for q and k, and the device functions that :mod:`minivllm_kernels.triton.norm_rotary_store` shares.

A program takes one token and a block of heads as two half tiles ``[heads, D / 2]``, since dimension i pairs with i + D / 2: both
of a pair are in the same thread. The tile has 512 pairs, one 16-byte load a half and thread at two warps. Any even D up to 256;
where D / 2 is no power of two, the rest of the tile is masked. Moves each element once in and once out; cos and sin are read
once a program and stay in the second-level cache. No autotuning: loads are as wide as they get, whatever the tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm_kernels.triton.compilation import CompileCase
from minivllm_kernels.triton.launch import COMPILER_OPTIONS, check_floats, check_rows, next_power_of_2

__all__ = [
    "COMPILE_CASES",
    "NUM_WARPS",
    "check_heads",
    "heads_a_program",
    "load_heads",
    "norm_heads",
    "rotary",
    "rotate",
    "store_heads",
]

NUM_WARPS = 2
PAIRS_A_PROGRAM = 512
MAX_HEAD_DIM = 256


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """See :func:`minivllm_kernels.rotary`; q and k may be views of one projection.

    Raises:
        ValueError: see :func:`check_heads`.
    """
    check_heads("rotary", q, k, positions, cos_sin)
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    tokens, q_heads, head_dim = q.shape
    k_heads = k.shape[1]
    if tokens == 0:
        return q_out, k_out
    half, heads = heads_a_program(head_dim, max(q_heads, k_heads))
    q_blocks = triton.cdiv(q_heads, heads)
    _rotary_kernel[(tokens, q_blocks + triton.cdiv(k_heads, heads))](
        q,
        k,
        q_out,
        k_out,
        positions,
        cos_sin,
        q_heads,
        k_heads,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        cos_sin.stride(0),
        q_blocks,
        HALF=head_dim // 2,
        HEADS=heads,
        BLOCK=half,
        num_warps=NUM_WARPS,
        num_stages=1,
        **COMPILER_OPTIONS,
    )
    return q_out, k_out


def check_heads(op: str, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
    """What rotation asks of its arguments.

    Raises:
        ValueError: not ``[T, H, D]`` and ``[T, K, D]`` of one float dtype with contiguous heads and an even D up to 256,
            positions that are not int64 ``[T]``, or a table that is not float32 ``[positions, D]``.
    """
    if q.dim() != 3 or k.dim() != 3 or q.shape[0] != k.shape[0] or q.shape[2] != k.shape[2]:
        raise ValueError(f"{op}: q must be [T, H, D] and k [T, K, D], got {list(q.shape)} and {list(k.shape)}")
    head_dim = q.shape[2]
    if head_dim % 2 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(
            f"{op}: a head of {head_dim}; rotation pairs dimensions, and the kernel takes up to {MAX_HEAD_DIM} of them"
        )
    check_floats(op, q=q, k=k)
    check_rows(op, q=q, k=k, positions=positions, cos_sin=cos_sin)
    if positions.dtype != torch.int64 or positions.shape != q.shape[:1]:
        raise ValueError(f"{op}: positions must be int64 [{q.shape[0]}], got {positions.dtype} {list(positions.shape)}")
    if cos_sin.dtype != torch.float32 or cos_sin.dim() != 2 or cos_sin.shape[1] != head_dim:
        raise ValueError(f"{op}: cos_sin must be float32 [positions, {head_dim}], got {cos_sin.dtype} {list(cos_sin.shape)}")


def heads_a_program(head_dim: int, most_heads: int) -> tuple[int, int]:
    """(width of a half tile, heads of a tile) for this head size; no more heads than there are, up to a power of two."""
    half = next_power_of_2(head_dim // 2)
    return half, min(max(PAIRS_A_PROGRAM // half, 1), next_power_of_2(most_heads))


@triton.jit
def load_heads(x, heads, columns, head_stride, num_heads, HALF: tl.constexpr):  # noqa: N803
    """Both halves ``[heads, columns]`` of the heads of one token, as float32; zero where there is none."""
    inside = (heads[:, None] < num_heads) & (columns[None, :] < HALF)
    first = x + heads[:, None] * head_stride + columns[None, :]
    return tl.load(first, mask=inside, other=0.0).to(tl.float32), tl.load(first + HALF, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def norm_heads(first, second, weight, columns, eps, HALF: tl.constexpr, dtype: tl.constexpr):  # noqa: N803
    """Root-mean-square norm of each head, rounded to ``dtype`` before and after the weight, as the reference is."""
    inside = columns < HALF
    mean = (tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF)
    scale = tl.rsqrt(mean + eps)[:, None]
    first_weight = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    second_weight = tl.load(weight + HALF + columns, mask=inside, other=0.0).to(tl.float32)[None, :]
    first = ((first * scale).to(dtype).to(tl.float32) * first_weight).to(dtype).to(tl.float32)
    second = ((second * scale).to(dtype).to(tl.float32) * second_weight).to(dtype).to(tl.float32)
    return first, second


@triton.jit
def rotate(first, second, cos_sin, columns, HALF: tl.constexpr):  # noqa: N803
    """The two halves turned by the angles of one position, whose row of the table ``cos_sin`` points to."""
    inside = columns < HALF
    cos = tl.load(cos_sin + columns, mask=inside, other=0.0)[None, :]
    sin = tl.load(cos_sin + HALF + columns, mask=inside, other=0.0)[None, :]
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _rotary_kernel(
    q,
    k,
    q_out,
    k_out,
    positions,
    cos_sin,
    q_heads,
    k_heads,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    table_stride,
    q_blocks,
    HALF: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    cos_sin += tl.load(positions + token) * table_stride
    if block < q_blocks:
        heads = block * HEADS + tl.arange(0, HEADS)
        _rotate_block(q + token * q_stride, q_out, token, heads, columns, q_head_stride, q_heads, cos_sin, HALF)
    else:
        heads = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        _rotate_block(k + token * k_stride, k_out, token, heads, columns, k_head_stride, k_heads, cos_sin, HALF)


@triton.jit
def _rotate_block(x, out, token, heads, columns, head_stride, num_heads, cos_sin, HALF: tl.constexpr):  # noqa: N803
    first, second = load_heads(x, heads, columns, head_stride, num_heads, HALF)
    first, second = rotate(first, second, cos_sin, columns, HALF)
    store_heads(out + token * num_heads * (2 * HALF), first, second, heads, columns, num_heads, HALF)


@triton.jit
def store_heads(out, first, second, heads, columns, num_heads, HALF: tl.constexpr):  # noqa: N803
    """Both halves to a token's contiguous ``[num_heads, 2 * HALF]``, in its dtype."""
    inside = (heads[:, None] < num_heads) & (columns[None, :] < HALF)
    where = out + heads[:, None] * (2 * HALF) + columns[None, :]
    tl.store(where, first.to(out.dtype.element_ty), mask=inside)
    tl.store(where + HALF, second.to(out.dtype.element_ty), mask=inside)


def _case(dtype: str, head_dim: int) -> CompileCase:
    half, heads = heads_a_program(head_dim, 16)
    strides = ("q_stride", "q_head_stride", "k_stride", "k_head_stride", "table_stride")
    return CompileCase(
        name=f"rotary {dtype} {head_dim}",
        kernel=_rotary_kernel,
        signature={
            **dict.fromkeys(("q", "k", "q_out", "k_out"), f"*{dtype}"),
            "positions": "*i64",
            "cos_sin": "*fp32",
            "q_heads": "i32",
            "k_heads": "i32",
            **dict.fromkeys(strides, "i32:16"),
            "q_blocks": "i32",
        },
        constexprs={"HALF": head_dim // 2, "HEADS": heads, "BLOCK": half},
        num_warps=NUM_WARPS,
        num_stages=1,
    )


COMPILE_CASES = (_case("bf16", 128), _case("fp32", 80))
