"""Paged attention in Triton as one would first write it: a program for each row and head, which walks through all keys.

No tensor cores, no tile of queries, nothing shared between heads of a group, the context not split: the distance to the kernels
of :mod:`minivllm_kernels.triton` is what those are worth.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm_kernels import AttentionMetadata
from minivllm_kernels.triton.launch import COMPILER_OPTIONS, next_power_of_2

__all__ = ["naive_attention"]

BLOCK_N = 32


def naive_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """As :func:`minivllm_kernels.attention`, for contiguous caches and batches whose sequences have equally many new tokens."""
    out = torch.empty_like(q)
    _naive_kernel[(q.shape[0], q.shape[1])](
        q,
        k_cache,
        v_cache,
        out,
        metadata.block_tables,
        metadata.lengths,
        metadata.block_tables.stride(0),
        scale,
        NEW=metadata.query_lens[0],
        HEADS=q.shape[1],
        KV_HEADS=k_cache.shape[2],
        HEAD_DIM=q.shape[2],
        BLOCK_SIZE=metadata.block_size,
        BLOCK_N=BLOCK_N,
        BLOCK_D=next_power_of_2(q.shape[2]),
        **COMPILER_OPTIONS,
    )
    return out


@triton.jit
def _naive_kernel(
    q,
    k_cache,
    v_cache,
    out,
    tables,
    lengths,
    table_stride,
    scale,
    NEW: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    KV_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    sequence = row // NEW
    seen = tl.load(lengths + sequence) - NEW + row % NEW + 1
    d = tl.arange(0, BLOCK_D)
    inside = d < HEAD_DIM
    place = (row * HEADS + head) * HEAD_DIM + d
    query = tl.load(q + place, mask=inside, other=0.0).to(tl.float32) * scale
    greatest, total = -float("inf"), 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(0, seen, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        block = tl.load(tables + sequence * table_stride + n // BLOCK_SIZE, mask=n < seen, other=0).to(tl.int64)
        slot = (block * BLOCK_SIZE + n % BLOCK_SIZE) * KV_HEADS + head // (HEADS // KV_HEADS)
        offsets, mask = slot[:, None] * HEAD_DIM + d[None, :], (n < seen)[:, None] & inside[None, :]
        k = tl.load(k_cache + offsets, mask=mask, other=0.0).to(tl.float32)
        scores = tl.where(n < seen, tl.sum(k * query[None, :], 1), float("-inf"))
        now = tl.maximum(greatest, tl.max(scores, 0))
        weights, fade = tl.exp(scores - now), tl.exp(greatest - now)
        v = tl.load(v_cache + offsets, mask=mask, other=0.0).to(tl.float32)
        acc = acc * fade + tl.sum(v * weights[:, None], 0)
        total = total * fade + tl.sum(weights, 0)
        greatest = now
    tl.store(out + place, (acc / total).to(out.dtype.element_ty), mask=inside)
