"""Batches over a poisoned paged cache, and attention over them as plainly as it can be written."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm_kernels import AttentionMetadata

__all__ = ["BATCHES", "attention_loop", "paged_batch", "poisoned"]

# New tokens and all tokens of each sequence.
BATCHES = {
    "one token": ([1], [1]),
    "one prefill": ([7], [7]),
    "decode, many lengths": ([1, 1, 1, 1], [1, 16, 17, 40]),
    "chunk after context": ([5], [21]),
    "mixed": ([1, 6, 1, 3], [9, 6, 33, 20]),
}


def poisoned(
    num_blocks: int, block_size: int, kv_heads: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Keys and values, all of them NaN."""
    shape = (num_blocks, block_size, kv_heads, dim)
    return torch.full(shape, torch.nan).to(dtype), torch.full(shape, torch.nan).to(dtype)


def paged_batch(
    shape: tuple[int, int, int],
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
    """A batch whose keys are stored in shuffled blocks; every other slot, block 0 of the padding too, is NaN.

    Args:
        shape: query heads, KV heads, head size.
        dtype: of the queries, and of the cache unless ``cache_dtype`` says otherwise.
    """
    heads, kv_heads, dim = shape
    needed = [-(-length // block_size) for length in seq_lens]
    blocks = random.Random(0).sample(range(1, sum(needed) + 4), sum(needed))
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    caches = poisoned(sum(needed) + 4, block_size, kv_heads, dim)
    slots = AttentionMetadata.build(seq_lens, seq_lens, tables, block_size).slot_mapping
    for cache in caches:
        cache.view(-1, kv_heads, dim)[slots] = torch.randn(sum(seq_lens), kv_heads, dim)
    k_cache, v_cache = (cache.to(cache_dtype or dtype) for cache in caches)
    metadata = AttentionMetadata.build(query_lens, seq_lens, tables, block_size)
    return torch.randn(sum(query_lens), heads, dim).to(dtype), k_cache, v_cache, metadata


def attention_loop(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """One query row and one head at a time, in float64, reading slot by slot through the block table."""
    group = q.shape[1] // k_cache.shape[2]
    out, row = torch.empty(q.shape, dtype=torch.float64), 0
    for b, (new, total) in enumerate(zip(metadata.query_lens, metadata.seq_lens or (), strict=True)):
        blocks = metadata.block_tables[b].tolist()
        places = [(blocks[i // metadata.block_size], i % metadata.block_size) for i in range(total)]
        keys = torch.stack([k_cache[block, offset].double() for block, offset in places])
        values = torch.stack([v_cache[block, offset].double() for block, offset in places])
        for position in range(total - new, total):
            for h in range(q.shape[1]):
                scores = keys[: position + 1, h // group] @ q[row, h].double() * scale
                out[row, h] = torch.softmax(scores, dim=0) @ values[: position + 1, h // group]
            row += 1
    return out
