"""What one forward pass needs to know about its batch. Built fresh each step by the runner, passed down, never changed.

Owns the geometry arithmetic (position -> slot); knows nothing of requests, sampling or schedulers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

__all__ = ["AttentionMetadata"]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Geometry of one batch of B sequences with T new tokens in all, stored sequence after sequence.

    Attributes:
        query_lens: new tokens of each sequence in this pass, B integers, each at least 1, T in sum.
        seq_lens: tokens of each sequence once this pass is done (context + new), B integers.
        block_tables: int64 ``[B, max_blocks]``; entries past a sequence's own blocks are padding and never read.
        slot_mapping: int64 ``[T]``, where each new token's key and value go; negative means nowhere.
        block_size: tokens per block.
        scratch: what a backend derives once and reuses in every layer of the same pass.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_tables: Tensor
    slot_mapping: Tensor
    block_size: int
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
        )
