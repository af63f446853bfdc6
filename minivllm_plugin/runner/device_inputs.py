"""From a layout to the tensors of one forward pass: packed into one host buffer, sent in one copy, seen as views.

Two buffers in turn, so that a batch is laid out while the one before it is still being copied.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from minivllm_kernels import AttentionMetadata
from minivllm_plugin.runner.host_buffer import HostBuffer, pack
from minivllm_plugin.runner.step_layout import StepLayout

__all__ = ["BatchInputs", "InputBuffers"]

FIRST_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class BatchInputs:
    """One batch on the device: T new tokens in all.

    Attributes:
        token_ids, positions: int64 ``[T]``.
        logit_rows: int64, the rows whose logits are wanted.
        pooled_rows: int64, the rows whose hidden states are wanted.
        is_replayed: whether a recorded graph computes it.
    """

    token_ids: Tensor
    positions: Tensor
    metadata: AttentionMetadata
    logit_rows: Tensor
    pooled_rows: Tensor
    is_replayed: bool = False


class InputBuffers:
    """What carries batches of any shape to ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [HostBuffer(FIRST_BYTES, device) for _ in range(2)]
        self._turn = 0

    def upload(self, layout: StepLayout, block_size: int, last_tokens: Tensor | None) -> BatchInputs:
        """Send a layout.

        Args:
            last_tokens: int64 on the device, what the preceding launch sampled; needed where ``layout.sources`` is not empty.
        """
        tokens, count = (len(layout.token_ids),), layout.num_sequences
        rows = layout.wanted.rows
        tables = (count, layout.max_blocks)
        sections = pack(
            [
                ("token_ids", torch.int64, tokens),
                ("positions", torch.int64, tokens),
                ("slots", torch.int64, tokens),
                ("sources", torch.int64, (len(layout.sources),)),
                ("logit_rows", torch.int64, (len(rows),)),
                ("pooled_rows", torch.int64, (len(layout.wanted.pooled),)),
                ("query_starts", torch.int32, (count + 1,)),
                ("lengths", torch.int32, (count,)),
                ("block_tables", torch.int32, tables),
            ]
        )
        num_bytes = sections[-1].end
        buffer = self._take(num_bytes)
        host = {section.name: section.of(buffer.memory).numpy() for section in sections}
        host["token_ids"][:] = layout.token_ids
        host["positions"][:] = layout.positions
        host["slots"][:] = layout.slots
        host["sources"][:] = layout.sources
        host["logit_rows"][:] = rows
        host["pooled_rows"][:] = layout.wanted.pooled
        host["query_starts"][:] = (0, *accumulate(layout.query_lens))
        host["lengths"][:] = layout.seq_lens
        host["block_tables"][:] = 0
        for row, table in zip(host["block_tables"], layout.block_tables, strict=True):
            row[: len(table)] = table
        memory = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        buffer.send(memory, num_bytes)
        sent = {section.name: section.of(memory) for section in sections}
        token_ids = sent["token_ids"]
        if layout.sources:
            assert last_tokens is not None, "a token is pending, but nothing was launched before"
            sources = sent["sources"]
            # A row that failed has no token; its request has ended, and any id will do for what nobody will see.
            token_ids = torch.where(sources < 0, token_ids, last_tokens[sources.clamp(min=0)].clamp(min=0))
        metadata = AttentionMetadata(
            query_lens=layout.query_lens,
            seq_lens=layout.seq_lens,
            block_tables=sent["block_tables"],
            slot_mapping=sent["slots"],
            block_size=block_size,
            query_starts=sent["query_starts"],
            lengths=sent["lengths"],
            max_seq_len=max(layout.seq_lens, default=0),
        )
        return BatchInputs(token_ids, sent["positions"], metadata, sent["logit_rows"], sent["pooled_rows"])

    def _take(self, num_bytes: int) -> HostBuffer:
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        buffer.wait()
        if buffer.memory.numel() < num_bytes:
            buffer = self._buffers[self._turn] = HostBuffer(1 << (num_bytes - 1).bit_length(), self._device)
        return buffer
