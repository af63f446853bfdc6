"""What a request asks to be done to its logits before anything is chosen: one row at a time, in place.

Order, equal to vLLM's: allowed_token_ids -> bad_words -> min_tokens -> logit_bias -> repetition, frequency, presence penalty.
Rows whose request asks for nothing are not touched.
"""

from collections import Counter
from collections.abc import Collection
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minivllm_plugin.engine.sequence import Sequence

__all__ = ["adjust_logits"]

KEY = "penalties"
FORBIDDEN = float("-inf")
# Beyond these, logits of float32 would become infinite, or NaN where they are 0; within, the effect is as absolute.
LEAST_FACTOR, MOST_FACTOR = 1e-30, 1e30


@dataclass(slots=True)
class _Seen:
    """Tokens of one request so far, counted along, so that a step looks at its new token only."""

    prompt: frozenset[int]
    completion: Counter[int] = field(default_factory=Counter)
    num_counted: int = 0


def adjust_logits(logits: Tensor, seqs: SequenceABC[Sequence], end_token_ids: Collection[int]) -> None:
    """Apply every row's own adjustments.

    Args:
        logits: float32 ``[S, V]``, changed in place.
        seqs: the sequence of each row.
        end_token_ids: what ends a sequence that does not ignore EOS; held back below ``min_tokens``.
    """
    for row, seq in enumerate(seqs):
        if seq.sampling_params.adjusts_logits:
            _adjust(logits[row], seq, end_token_ids)


def _adjust(row: Tensor, seq: Sequence, end_token_ids: Collection[int]) -> None:
    params = seq.sampling_params
    vocab_size = row.shape[0]
    if params.allowed_token_ids is not None:
        allowed = torch.tensor(params.allowed_token_ids, dtype=torch.int64, device=row.device)
        kept = row[allowed]
        row.fill_(FORBIDDEN)
        row[allowed] = kept
    if params.bad_words_token_ids:
        row[_completing_tokens(seq)] = FORBIDDEN
    if seq.num_completion_tokens < params.min_tokens:
        row[_end_ids(seq, end_token_ids, vocab_size)] = FORBIDDEN
    if params.logit_bias:
        tokens = torch.tensor(list(params.logit_bias), dtype=torch.int64, device=row.device)
        row[tokens] += torch.tensor(list(params.logit_bias.values()), dtype=row.dtype, device=row.device)
    if params.has_penalties:
        _penalise(row, seq)


def _completing_tokens(seq: Sequence) -> list[int]:
    """Last tokens of bad words whose other tokens are what the completion ends with."""
    completion = seq.token_ids
    start = seq.num_prompt_tokens
    tokens = []
    for word in seq.sampling_params.bad_words_token_ids:
        head = len(word) - 1
        if len(completion) - start >= head and (not head or tuple(completion[-head:]) == word[:-1]):
            tokens.append(word[-1])
    return tokens


def _end_ids(seq: Sequence, end_token_ids: Collection[int], vocab_size: int) -> list[int]:
    ends = set(seq.sampling_params.stop_token_ids or ())
    if not seq.ignore_eos:
        ends.update(end_token_ids)
    return [token for token in ends if 0 <= token < vocab_size]


def _penalise(row: Tensor, seq: Sequence) -> None:
    params = seq.sampling_params
    seen: _Seen | None = seq.attachments.get(KEY)
    if seen is None:
        seen = seq.attachments[KEY] = _Seen(frozenset(seq.prompt_token_ids))
    seen.completion.update(seq.token_ids[seq.num_prompt_tokens + seen.num_counted :])
    seen.num_counted = seq.num_completion_tokens
    if params.repetition_penalty != 1.0:
        tokens = torch.tensor(sorted(seen.prompt | seen.completion.keys()), dtype=torch.int64, device=row.device)
        values = row[tokens]
        factor = min(max(params.repetition_penalty, LEAST_FACTOR), MOST_FACTOR)
        row[tokens] = torch.where(values > 0, values / factor, values * factor)
    if seen.completion and (params.frequency_penalty or params.presence_penalty):
        tokens = torch.tensor(list(seen.completion), dtype=torch.int64, device=row.device)
        counts = torch.tensor(list(seen.completion.values()), dtype=row.dtype, device=row.device)
        row[tokens] -= params.frequency_penalty * counts + params.presence_penalty
