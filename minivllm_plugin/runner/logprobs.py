"""Log-probabilities of the rows that ask for them, from raw logits: before anything is added, masked or divided."""

from collections.abc import Sequence as SequenceABC

import torch
from torch import Tensor

from minivllm_plugin.engine.logprobs import TokenLogprobs
from minivllm_plugin.engine.sequence import Sequence

__all__ = ["RawLogprobs", "describe_rows"]

ROWS_AT_ONCE = 64  # of a prompt: a log-softmax over a vocabulary of 150,000 takes 600 kB a row


class RawLogprobs:
    """The rows of one batch that want log-probabilities, taken before the logits are changed.

    Args:
        logits: float32 ``[S, V]``.
        seqs: the sequence of each row.
    """

    def __init__(self, logits: Tensor, seqs: SequenceABC[Sequence]) -> None:
        self._rows = [row for row, seq in enumerate(seqs) if seq.sampling_params.logprobs is not None]
        self._counts = [seqs[row].sampling_params.logprobs or 0 for row in self._rows]
        self._values = torch.log_softmax(logits[self._rows], dim=1) if self._rows else None

    def of(self, tokens: SequenceABC[int]) -> dict[int, TokenLogprobs]:
        """Row -> what is to be told about the token that was chosen in it. A failed row (a negative token) is left out."""
        if self._values is None:
            return {}
        healthy = [place for place, row in enumerate(self._rows) if tokens[row] >= 0]
        if not healthy:
            return {}
        chosen = [tokens[self._rows[place]] for place in healthy]
        told = _describe(self._values[healthy], chosen, [self._counts[place] for place in healthy])
        return {self._rows[place]: entry for place, entry in zip(healthy, told, strict=True)}


def describe_rows(logits: Tensor, token_ids: SequenceABC[int], count: int) -> list[TokenLogprobs]:
    """The record of ``token_ids[r]`` under ``logits[r]``, for each row; ``count`` of the most likely tokens beside it."""
    told: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), ROWS_AT_ONCE):
        part = torch.log_softmax(logits[start : start + ROWS_AT_ONCE], dim=1)
        tokens = token_ids[start : start + ROWS_AT_ONCE]
        told += _describe(part, tokens, [count] * len(tokens))
    return told


def _describe(logprobs: Tensor, token_ids: SequenceABC[int], counts: SequenceABC[int]) -> list[TokenLogprobs]:
    index = torch.tensor(token_ids, dtype=torch.int64, device=logprobs.device).unsqueeze(1)
    chosen = logprobs.gather(1, index)
    ranks = (logprobs > chosen).sum(dim=1) + 1
    most = min(max(counts), logprobs.shape[1])
    top = torch.topk(logprobs, most, dim=1)
    top_ids, top_values = top.indices.tolist(), top.values.tolist()
    return [
        TokenLogprobs(token, logprob, rank, tuple(ids[:count]), tuple(values[:count]))
        for token, logprob, rank, ids, values, count in zip(
            token_ids, chosen.squeeze(1).tolist(), ranks.tolist(), top_ids, top_values, counts, strict=True
        )
    ]
