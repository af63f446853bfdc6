"""Runs batches on the compiled CPU kernels: the whole step is one library call, outside the GIL.

Same interface as :class:`minivllm_plugin.runner.model_runner.ModelRunner`; torch is used for sampling only.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minivllm_kernels.cpu.decoder import CpuDecoder
from minivllm_kernels.dispatch import BackendTable, using
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.runner.rows import LogitRows
from minivllm_plugin.runner.sampler import sample

if TYPE_CHECKING:
    from minivllm_plugin.extensions.logits_pipeline import LogitsPipeline

__all__ = ["CpuRunner"]


class CpuRunner:
    """A decoder with its cache.

    Args:
        decoder: weights and cache.
        end_token_ids: tokens that ``min_tokens`` holds back.
        backends: what chooses tokens; None is the built-in backends.

    Attributes:
        processors: the logits processors of plugins; None when there are none.
    """

    can_pool = True
    can_speculate = True  # a row has the same bits alone and among others, so a guess that is right changes nothing

    def __init__(self, decoder: CpuDecoder, end_token_ids: Collection[int], backends: BackendTable | None = None) -> None:
        self.processors: LogitsPipeline | None = None
        self._backends = backends
        self._decoder = decoder
        self._end_token_ids = frozenset(end_token_ids)

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int | list[int]]:
        """One token per sequence; see :class:`minivllm_plugin.engine.llm_engine.Runner`."""
        token_ids: list[int] = []
        query_lens, seq_lens = [], []
        wanted = LogitRows()
        for index, seq in enumerate(seqs):
            start = seq.num_computed_tokens
            end = start + seq.num_scheduled_tokens
            wanted.add(index, seq, len(token_ids))
            token_ids += seq.token_ids[start:end]
            token_ids += seq.draft_token_ids
            query_lens.append(end - start)
            seq_lens.append(end)
        states = torch.empty(len(wanted.pooled), self._decoder.geometry.hidden_size) if wanted.pooled else None
        tables = [seq.block_table for seq in seqs]
        logits = self._decoder.forward(token_ids, query_lens, seq_lens, tables, wanted.rows, wanted.pooled, states)
        return wanted.answers(logits, states, seqs, self._choose)

    def _choose(self, logits: Tensor, seqs: list[Sequence]) -> list[int]:
        with using(self._backends):
            return sample(logits, seqs, self._end_token_ids, self.processors)
