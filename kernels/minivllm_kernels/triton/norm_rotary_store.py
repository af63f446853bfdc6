"""What stands between the projections and attention, in one launch: per-head norm, rotation, store.

One program takes one token and a block of query heads, or a block of key heads with the values beside them. A head stays in
registers from load to store: apart from the table, ``T * (H + 2 * K) * D`` elements are read and as many written, where
norm, rotation and store as ops of their own move about twice that in four launches. q, k and v are views of one
projection and are read where they stand. Tiles as in :mod:`minivllm_kernels.triton.rotary`; no autotuning, for the reason
given there. Every rounding of the reference is made, in its place.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm_kernels.triton.compilation import CompileCase
from minivllm_kernels.triton.launch import COMPILER_OPTIONS, check_floats, check_rows
from minivllm_kernels.triton.rotary import NUM_WARPS, check_heads, heads_a_program, load_heads, norm_heads, rotate, store_heads
from minivllm_kernels.triton.store_kv import check_caches, slot_offset, store_tile

__all__ = ["COMPILE_CASES", "norm_rotary_store"]


def norm_rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """See :func:`minivllm_kernels.norm_rotary_store`; scales as in :func:`minivllm_kernels.triton.store_kv.store_kv`.

    Raises:
        ValueError: as ``rotary`` and ``store_kv``; or only one of the norms' weights is given, or one is not ``[D]``.
    """
    op = "norm_rotary_store"
    check_heads(op, q, k, positions, cos_sin)
    check_floats(op, k=k, v=v)
    keys, values, kind = check_caches(op, k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    if (q_weight is None) != (k_weight is None):
        raise ValueError(f"{op}: give both q_weight and k_weight, or neither")
    if q_weight is not None and k_weight is not None:
        check_floats(op, q=q, q_weight=q_weight, k_weight=k_weight)
        check_rows(op, q_weight=q_weight, k_weight=k_weight)
        if not q_weight.shape == k_weight.shape == q.shape[2:]:
            raise ValueError(f"{op}: weights must be [{q.shape[2]}], got {list(q_weight.shape)} and {list(k_weight.shape)}")
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    tokens, q_heads, head_dim = q.shape
    k_heads = k.shape[1]
    if tokens == 0:
        return out
    half, heads = heads_a_program(head_dim, max(q_heads, k_heads))
    q_blocks = triton.cdiv(q_heads, heads)
    _norm_rotary_store_kernel[(tokens, q_blocks + triton.cdiv(k_heads, heads))](
        q,
        k,
        v,
        out,
        positions,
        cos_sin,
        keys,
        values,
        slot_mapping,
        cos_sin if q_weight is None else q_weight,  # never read without a norm
        cos_sin if k_weight is None else k_weight,
        q_heads,
        k_heads,
        q_blocks,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        cos_sin.stride(0),
        keys.stride(1),
        keys.stride(2),
        values.stride(1),
        values.stride(2),
        eps,
        k_scale,
        v_scale,
        NORM=q_weight is not None,
        HALF=head_dim // 2,
        HEADS=heads,
        BLOCK=half,
        FORMAT=kind,
        num_warps=NUM_WARPS,
        num_stages=1,
        **COMPILER_OPTIONS,
    )
    return out


@triton.jit
def _norm_rotary_store_kernel(
    q,
    k,
    v,
    out,
    positions,
    cos_sin,
    k_cache,
    v_cache,
    slots,
    q_weight,
    k_weight,
    q_heads,
    k_heads,
    q_blocks,
    q_stride,
    q_head_stride,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    table_stride,
    k_slot_stride,
    k_cache_head_stride,
    v_slot_stride,
    v_cache_head_stride,
    eps,
    k_scale,
    v_scale,
    NORM: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    FORMAT: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    dtype: tl.constexpr = out.dtype.element_ty
    table = cos_sin + tl.load(positions + token) * table_stride
    if block < q_blocks:
        heads = block * HEADS + tl.arange(0, HEADS)
        first, second = load_heads(q + token * q_stride, heads, columns, q_head_stride, q_heads, HALF)
        if NORM:
            first, second = norm_heads(first, second, q_weight, columns, eps, HALF, dtype)
        first, second = rotate(first, second, table, columns, HALF)
        store_heads(out + token * q_heads * (2 * HALF), first, second, heads, columns, q_heads, HALF)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            heads = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
            inside = (heads[:, None] < k_heads) & (columns[None, :] < HALF)
            first, second = load_heads(k + token * k_stride, heads, columns, k_head_stride, k_heads, HALF)
            if NORM:
                first, second = norm_heads(first, second, k_weight, columns, eps, HALF, dtype)
            first, second = rotate(first, second, table, columns, HALF)
            offsets = slot_offset(slot, k_slot_stride) + heads[:, None] * k_cache_head_stride + columns[None, :]
            store_tile(k_cache, first.to(dtype).to(tl.float32), offsets, inside, k_scale, FORMAT)
            store_tile(k_cache, second.to(dtype).to(tl.float32), offsets + HALF, inside, k_scale, FORMAT)
            first, second = load_heads(v + token * v_stride, heads, columns, v_head_stride, k_heads, HALF)
            offsets = slot_offset(slot, v_slot_stride) + heads[:, None] * v_cache_head_stride + columns[None, :]
            store_tile(v_cache, first, offsets, inside, v_scale, FORMAT)
            store_tile(v_cache, second, offsets + HALF, inside, v_scale, FORMAT)


def _case(dtype: str, cache: str, kind: str, head_dim: int, norm: bool, one_kv_head: bool = False) -> CompileCase:
    half, heads = heads_a_program(head_dim, 16)
    counts = "i32:1" if one_kv_head else "i32"  # a launch compiles in what is 1
    suffixes = ["norm"] * norm + ["1 KV head"] * one_kv_head
    strides = (
        *("q_stride", "q_head_stride", "k_stride", "k_head_stride", "v_stride", "v_head_stride", "table_stride"),
        *("k_slot_stride", "k_cache_head_stride", "v_slot_stride", "v_cache_head_stride"),
    )
    return CompileCase(
        name=" ".join(("norm_rotary_store", dtype, "to", kind if kind != "plain" else cache, str(head_dim), *suffixes)),
        kernel=_norm_rotary_store_kernel,
        signature={
            **dict.fromkeys(("q", "k", "v", "out", "q_weight", "k_weight"), f"*{dtype}"),
            **dict.fromkeys(("k_cache", "v_cache"), f"*{cache}"),
            **dict.fromkeys(("positions", "slots"), "*i64"),
            "cos_sin": "*fp32",
            "q_heads": "i32",
            **dict.fromkeys(("k_heads", "q_blocks"), counts),
            **dict.fromkeys(strides, "i32:16"),
            **dict.fromkeys(("eps", "k_scale", "v_scale"), "fp32"),
        },
        constexprs={"NORM": norm, "HALF": head_dim // 2, "HEADS": heads, "BLOCK": half, "FORMAT": kind},
        num_warps=NUM_WARPS,
        num_stages=1,
    )


COMPILE_CASES = (
    _case("bf16", "bf16", "plain", 128, norm=True),
    _case("bf16", "bf16", "plain", 64, norm=False),
    _case("fp16", "fp16", "plain", 80, norm=False, one_kv_head=True),
    _case("fp32", "fp32", "plain", 256, norm=True),
    _case("bf16", "u8", "e4m3", 128, norm=True),
    _case("bf16", "u8", "e5m2", 96, norm=False),
)
