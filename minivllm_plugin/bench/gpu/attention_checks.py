"""Attention over a poisoned paged cache against the reference in float32, on the device's own tensors.

Blocks are shuffled, every slot that no sequence owns is NaN, and for our own kernels the table entries behind a sequence's blocks
are far outside the pool (the engine has zeros there, which is what others are given).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from minivllm_kernels import AttentionGeometry, AttentionMetadata, reference
from minivllm_plugin.bench.gpu.comparing import comparing
from minivllm_plugin.bench.gpu.records import Given, Recorder

__all__ = ["SMALL", "check_attention"]

BEYOND_THE_POOL = 2**30
SHAPES = ((16, 8, 128), (9, 3, 64), (4, 1, 80), (8, 2, 256), (24, 1, 128))
"""Query heads, KV heads, head size."""

BATCHES: dict[str, tuple[Sequence[int], Sequence[int]]] = {
    "decode": ([1] * 6, [1, 16, 17, 255, 700, 4100]),
    "prompts": ([7, 130, 333], [7, 130, 333]),
    "chunk after context": ([65], [900]),
    "mixed": ([1, 60, 1, 3, 1], [9, 60, 2500, 20, 257]),
}
"""New tokens and all tokens of each sequence."""

SMALL = {"decode": ([1, 1, 1], [1, 17, 300]), "mixed": ([1, 6, 1, 3], [9, 6, 33, 20])}
"""Enough for a debugger that slows everything down a hundredfold, and for an interpreter."""


def check_attention(ops: Any, title: str, given: Given, record: Recorder, *, small: bool = False) -> None:
    """What ``ops``, a backend's module, says it cannot do is left out.

    Args:
        title: what it is called in the checks.
        small: few and short batches.
    """
    behind = 0 if title == "flash-attn" else BEYOND_THE_POOL
    torch.manual_seed(2)
    small = small or given.rehearse
    types = [(torch.float32, torch.float32)] if given.rehearse else [(torch.bfloat16, torch.bfloat16)]
    if not small:
        more = ((torch.float16, torch.float16), (torch.float32, torch.float32))
        types += [*more, *((torch.bfloat16, eight) for eight in (torch.float8_e4m3fn, torch.float8_e5m2))]
    for dtype, stored in types:
        for shape in SHAPES if dtype == stored == torch.bfloat16 and not small else SHAPES[:1]:
            for size in (16,) if small or shape != SHAPES[0] else (16, 256):
                geometry = AttentionGeometry(*shape, size, dtype, stored)
                if ops.unsupported("attention", geometry) is not None:
                    continue
                for name, batch in (SMALL if small else BATCHES).items():
                    _check(ops, f"{title} {name}, {_words(geometry)}", geometry, batch, behind, given.device, record)
                _check_padded(ops, f"{title} decode with padded rows, {_words(geometry)}", geometry, behind, given.device, record)


def _check(
    ops: Any,
    name: str,
    geometry: AttentionGeometry,
    batch: tuple[Sequence[int], Sequence[int]],
    behind: int,
    device: str,
    record: Recorder,
) -> None:
    with comparing(record, name) as found:
        q, k_cache, v_cache, metadata = _batch(geometry, *batch, behind, device)
        got = ops.attention(q, k_cache, v_cache, metadata, 0.2)
        found.close("result", got.float(), _expected(q, k_cache, v_cache, metadata), times=_times(geometry.dtype))


def _check_padded(ops: Any, name: str, geometry: AttentionGeometry, behind: int, device: str, record: Recorder) -> None:
    """As in a captured graph: lengths on the device only, rows of length 0, a bound that is far too wide."""
    with comparing(record, name) as found:
        lengths = [5, 290, 40]
        q, k_cache, v_cache, plain = _batch(geometry, [1] * 3, lengths, behind, device)
        rows = len(lengths) + 2
        metadata = replace(
            plain,
            query_lens=(1,) * rows,
            seq_lens=None,
            block_tables=torch.cat((plain.block_tables, torch.zeros_like(plain.block_tables[:2]))),
            slot_mapping=torch.cat((plain.slot_mapping, torch.full((2,), -1, device=device))),
            query_starts=torch.arange(rows + 1, dtype=torch.int32, device=device),
            lengths=torch.cat((plain.lengths, torch.zeros(2, dtype=torch.int32, device=device))),
            max_seq_len=plain.block_tables.shape[1] * geometry.block_size,
            scratch={},
        )
        got = ops.attention(torch.cat((q, torch.randn_like(q[:2]))), k_cache, v_cache, metadata, 0.2)
        found.close("result", got[:3].float(), _expected(q, k_cache, v_cache, plain), times=_times(geometry.dtype))


def _batch(
    geometry: AttentionGeometry, query_lens: Sequence[int], seq_lens: Sequence[int], behind: int, device: str
) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
    size, heads, dim = geometry.block_size, geometry.num_kv_heads, geometry.head_dim
    needed = [-(-length // size) for length in seq_lens]
    blocks = (torch.randperm(sum(needed) + 2) + 1).tolist()
    tables = [[blocks.pop() for _ in range(count)] for count in needed]
    slots = AttentionMetadata.build(seq_lens, seq_lens, tables, size).slot_mapping.to(device)
    caches = []
    for _ in range(2):
        cache = torch.full((sum(needed) + 3, size, heads, dim), torch.nan, device=device)
        cache.view(-1, heads, dim)[slots] = torch.randn(sum(seq_lens), heads, dim, device=device)
        caches.append(cache.to(geometry.cache_dtype))
    width = max(needed) + 3  # behind a sequence's own blocks: an access there would end the process
    padded = [[*table, *[behind] * (width - len(table))] for table in tables]
    metadata = replace(
        AttentionMetadata.build(query_lens, seq_lens, tables, size, device),
        block_tables=torch.tensor(padded, dtype=torch.int32, device=device),
    )
    q = torch.randn(sum(query_lens), geometry.num_heads, dim, device=device).to(geometry.dtype)
    return q, caches[0], caches[1], metadata


def _expected(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata) -> Tensor:
    """The reference over the same stored numbers, in float32; its own tables, since it gathers whole rows of them."""
    tables = metadata.block_tables.masked_fill(metadata.block_tables == BEYOND_THE_POOL, 0)
    return reference.attention(
        q.float(), k_cache.float(), v_cache.float(), replace(metadata, block_tables=tables, scratch={}), 0.2
    )


def _times(dtype: torch.dtype) -> float:
    """What is compared is float32: how many of its last places the rounding of ``dtype`` takes, weights and sums included."""
    return {torch.float32: 8.0, torch.bfloat16: 2**-7 / 4e-6 * 3, torch.float16: 2**-10 / 4e-6 * 4}[dtype]


def _words(geometry: AttentionGeometry) -> str:
    dtype, stored = (str(one).removeprefix("torch.") for one in (geometry.dtype, geometry.cache_dtype))
    kinds = dtype if dtype == stored else f"{dtype} over {stored}"
    return f"{kinds} {geometry.num_heads}/{geometry.num_kv_heads}/{geometry.head_dim}, blocks of {geometry.block_size}"
