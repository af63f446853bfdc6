"""From sequences to the tensors of one forward pass. Reads sequences, changes nothing."""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm_kernels import AttentionMetadata
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.runner.rows import LogitRows

__all__ = ["BatchInputs", "build_inputs"]


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One batch, sequences side by side: T new tokens in all.

    Attributes:
        token_ids, positions: int64 ``[T]``.
        wanted: whose logits are needed, and for what.
        logit_rows: int64, the rows of ``wanted``.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    wanted: LogitRows
    logit_rows: Tensor


def build_inputs(seqs: SequenceABC[Sequence], block_size: int, device: torch.device) -> BatchInputs:
    """Lay out tokens ``num_computed .. num_computed + num_scheduled - 1`` of every sequence."""
    token_ids: list[int] = []
    positions: list[int] = []
    query_lens, seq_lens = [], []
    wanted = LogitRows()
    for index, seq in enumerate(seqs):
        start = seq.num_computed_tokens
        end = start + seq.num_scheduled_tokens
        wanted.add(index, seq, len(token_ids))
        token_ids += seq.token_ids[start:end]
        positions += range(start, end)
        query_lens.append(end - start)
        seq_lens.append(end)
    return BatchInputs(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        metadata=AttentionMetadata.build(query_lens, seq_lens, [seq.block_table for seq in seqs], block_size, device),
        wanted=wanted,
        logit_rows=torch.tensor(wanted.rows, dtype=torch.int64, device=device),
    )
