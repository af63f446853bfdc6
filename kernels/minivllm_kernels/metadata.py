"""What one forward pass needs to know about its batch. Built fresh each step by the runner, passed down, never changed.

Owns the geometry arithmetic (position -> slot); knows nothing of requests, sampling or schedulers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

__all__ = ["AttentionGeometry", "AttentionMetadata"]


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """What of a model, its cache and its settings stays the same for all passes: what a backend may be unable to do.

    Attributes:
        block_size: tokens per block of the cache.
        dtype: of queries and activations.
        cache_dtype: of keys and values in the cache.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Geometry of one batch of B sequences with T new tokens in all, stored sequence after sequence.

    Attributes:
        query_lens: new tokens of each sequence in this pass, B integers, each at least 1, T in sum.
        seq_lens: tokens of each sequence once this pass is done (context + new), B integers. None in a captured graph, which is
            replayed for batches with other lengths: only the tensors are read then, and every ``query_lens`` is 1.
        block_tables: int32 or int64 ``[B, max_blocks]``; entries past a sequence's own blocks are padding and never read.
        slot_mapping: int64 ``[T]``, where each new token's key and value go; negative means nowhere.
        block_size: tokens per block.
        query_starts: int32 ``[B + 1]`` on the device, first row of each sequence, then T.
        lengths: int32 ``[B]`` on the device, the same as ``seq_lens``. A sequence of length 0 is padding: its row is computed
            from nothing, and its output means nothing.
        max_seq_len: no length is greater. More than the greatest of ``seq_lens`` where a captured graph serves many batches.
        scratch: what a backend derives once and reuses in every layer of the same pass.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...] | None
    block_tables: Tensor
    slot_mapping: Tensor
    block_size: int
    query_starts: Tensor
    lengths: Tensor
    max_seq_len: int
    scratch: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> "AttentionMetadata":
        """From plain lists: one block table (block ids in order) per sequence."""
        width = max((len(table) for table in block_tables), default=0)
        padded = [[*table, *([0] * (width - len(table)))] for table in block_tables]
        slots = [
            table[position // block_size] * block_size + position % block_size
            for table, new, total in zip(block_tables, query_lens, seq_lens, strict=True)
            for position in range(total - new, total)
        ]
        return cls(
            query_lens=tuple(query_lens),
            seq_lens=tuple(seq_lens),
            block_tables=torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(padded), width),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            block_size=block_size,
            query_starts=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
            lengths=torch.tensor(seq_lens, dtype=torch.int32, device=device),
            max_seq_len=max(seq_lens, default=0),
        )

    @property
    def max_query_len(self) -> int:
        """The most new tokens of one sequence."""
        return max(self.query_lens, default=0)
