"""From sequences to the tensors of one forward pass. Reads sequences, changes nothing."""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm_kernels import AttentionMetadata
from minivllm_plugin.engine.sequence import Sequence

__all__ = ["BatchInputs", "build_inputs"]


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One batch, sequences side by side: T new tokens in all, S of the sequences computed to their end.

    Attributes:
        token_ids, positions: int64 ``[T]``.
        sampled: indices into the batch of the S sequences that get a next token.
        last_rows: int64 ``[S]``, the row of the last token of each of these.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    sampled: tuple[int, ...]
    last_rows: Tensor


def build_inputs(seqs: SequenceABC[Sequence], block_size: int, device: torch.device) -> BatchInputs:
    """Lay out tokens ``num_computed .. num_computed + num_scheduled - 1`` of every sequence."""
    token_ids: list[int] = []
    positions: list[int] = []
    query_lens, seq_lens, sampled, last_rows = [], [], [], []
    for index, seq in enumerate(seqs):
        start = seq.num_computed_tokens
        end = start + seq.num_scheduled_tokens
        token_ids += seq.token_ids[start:end]
        positions += range(start, end)
        query_lens.append(end - start)
        seq_lens.append(end)
        if end == seq.num_tokens:
            sampled.append(index)
            last_rows.append(len(token_ids) - 1)
    return BatchInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        metadata=AttentionMetadata.build(query_lens, seq_lens, [seq.block_table for seq in seqs], block_size, device),
        sampled=tuple(sampled),
        last_rows=torch.tensor(last_rows, dtype=torch.int64, device=device),
    )
