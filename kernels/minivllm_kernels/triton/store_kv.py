"""New keys and values into the paged cache, and the device functions that the fused kernel shares.

Caches are ``[num_blocks, block_size, K, D]``; a slot is ``block * block_size + offset``, so its first element is
``slot * stride(1)`` away, computed in int64: slot 4,000,000 of 3 heads of 256 is beyond 2 ** 31. A program takes one token and
as many heads as make a tile of 1024 elements, keys and values alike. Moves ``2 * T * K * D`` elements in and out. A negative
slot ends its program before anything else is read: padded rows of a captured graph write nowhere.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm_kernels.triton.compilation import CompileCase
from minivllm_kernels.triton.kv_types import as_stored, check_scale, narrow
from minivllm_kernels.triton.launch import COMPILER_OPTIONS, check_floats, check_rows, next_power_of_2

__all__ = ["COMPILE_CASES", "check_caches", "slot_offset", "store_kv", "store_tile"]

NUM_WARPS = 4
ELEMENTS_A_PROGRAM = 1024
MAX_HEAD_DIM = 256


def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """See :func:`minivllm_kernels.store_kv`; k and v may be views of one projection, the caches 8-bit floats.

    Args:
        k_scale, v_scale: an 8-bit cache holds ``value / scale``, saturated.

    Raises:
        ValueError: see :func:`check_caches`.
    """
    check_floats("store_kv", k=k, v=v)
    keys, values, kind = check_caches("store_kv", k, v, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    tokens, num_heads, head_dim = k.shape
    if k.numel() == 0:
        return
    width = next_power_of_2(head_dim)
    heads = min(max(ELEMENTS_A_PROGRAM // width, 1), next_power_of_2(num_heads))
    _store_kv_kernel[(tokens, triton.cdiv(num_heads, heads))](
        k,
        v,
        keys,
        values,
        slot_mapping,
        num_heads,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        keys.stride(1),
        keys.stride(2),
        values.stride(1),
        values.stride(2),
        k_scale,
        v_scale,
        HEAD_DIM=head_dim,
        HEADS=heads,
        BLOCK=width,
        FORMAT=kind,
        num_warps=NUM_WARPS,
        num_stages=1,
        **COMPILER_OPTIONS,
    )


def check_caches(
    op: str,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: float,
    v_scale: float,
) -> tuple[Tensor, Tensor, str]:
    """Both caches as the kernel takes them, and the format in which they are written.

    Raises:
        ValueError: k and v are not ``[T, K, D]`` both with contiguous heads of up to 256; the caches are not
            ``[blocks, block size, K, D]`` of one dtype whose blocks follow each other without a gap; slots are not int64
            ``[T]``; or a scale is not positive, or not 1.0 for a cache that stores values as they are.
    """
    if k.dim() != 3 or k.shape != v.shape or k.shape[2] > MAX_HEAD_DIM:
        raise ValueError(f"{op}: k and v must be [T, K, D] with D up to {MAX_HEAD_DIM}, got {list(k.shape)} and {list(v.shape)}")
    if k_cache.dim() != 4 or k_cache.shape != v_cache.shape or k_cache.shape[2:] != k.shape[1:] or k_cache.dtype != v_cache.dtype:
        raise ValueError(
            f"{op}: caches must be [blocks, block size, {k.shape[1]}, {k.shape[2]}] of one dtype, got "
            f"{list(k_cache.shape)} {k_cache.dtype} and {list(v_cache.shape)} {v_cache.dtype}"
        )
    check_rows(op, k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.stride(0) != cache.shape[1] * cache.stride(1) and cache.shape[0] > 1:
            raise ValueError(f"{op}: {name} has strides {tuple(cache.stride())}; a block must begin where the one before it ends")
    if slot_mapping.dtype != torch.int64 or slot_mapping.shape != k.shape[:1]:
        raise ValueError(f"{op}: slots must be int64 [{k.shape[0]}], got {slot_mapping.dtype} {list(slot_mapping.shape)}")
    keys, kind = as_stored(op, k_cache)
    values, _ = as_stored(op, v_cache)
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        check_scale(op, name, scale)
        if kind == "plain" and scale != 1.0:
            raise ValueError(f"{op}: {name}={scale} for a cache of {k_cache.dtype}, which stores values as they are; give 1.0")
    return keys, values, kind


@triton.jit
def slot_offset(slot, slot_stride):
    """Elements between the start of a cache and a slot, in int64 whatever the type of its factors."""
    return slot.to(tl.int64) * slot_stride


@triton.jit
def store_tile(cache, x, offsets, inside, scale, FORMAT: tl.constexpr):  # noqa: N803
    """float32 ``x`` to these offsets of the cache, in its format."""
    if FORMAT != "plain":
        x = x / scale
    tl.store(cache + offsets, narrow(x, cache.dtype.element_ty, FORMAT), mask=inside)


@triton.jit
def _store_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    num_heads,
    k_stride,
    k_head_stride,
    v_stride,
    v_head_stride,
    k_slot_stride,
    k_cache_head_stride,
    v_slot_stride,
    v_cache_head_stride,
    k_scale,
    v_scale,
    HEAD_DIM: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    FORMAT: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (heads < num_heads) & (columns < HEAD_DIM)
    key = tl.load(k + token * k_stride + heads * k_head_stride + columns, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(v + token * v_stride + heads * v_head_stride + columns, mask=inside, other=0.0).to(tl.float32)
    k_offsets = slot_offset(slot, k_slot_stride) + heads * k_cache_head_stride + columns
    v_offsets = slot_offset(slot, v_slot_stride) + heads * v_cache_head_stride + columns
    store_tile(k_cache, key, k_offsets, inside, k_scale, FORMAT)
    store_tile(v_cache, value, v_offsets, inside, v_scale, FORMAT)


def _case(dtype: str, cache: str, kind: str, head_dim: int) -> CompileCase:
    width = next_power_of_2(head_dim)
    strides = ("k_stride", "k_head_stride", "v_stride", "v_head_stride", "k_slot_stride", "k_cache_head_stride", "v_slot_stride")
    return CompileCase(
        name=f"store_kv {dtype} to {kind if kind != 'plain' else cache} {head_dim}",
        kernel=_store_kv_kernel,
        signature={
            **dict.fromkeys(("k", "v"), f"*{dtype}"),
            **dict.fromkeys(("k_cache", "v_cache"), f"*{cache}"),
            "slots": "*i64",
            "num_heads": "i32",
            **dict.fromkeys((*strides, "v_cache_head_stride"), "i32:16"),
            **dict.fromkeys(("k_scale", "v_scale"), "fp32"),
        },
        constexprs={"HEAD_DIM": head_dim, "HEADS": max(ELEMENTS_A_PROGRAM // width, 1), "BLOCK": width, "FORMAT": kind},
        num_warps=NUM_WARPS,
        num_stages=1,
    )


COMPILE_CASES = (
    _case("bf16", "bf16", "plain", 128),
    _case("fp16", "u8", "e4m3", 80),
    _case("fp32", "u8", "e5m2", 256),
)
