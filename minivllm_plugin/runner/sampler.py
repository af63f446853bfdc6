"""From logits to the next token of each row, every row on its own.

Order of the steps, equal to vLLM's: end tokens masked while below ``min_tokens`` -> temperature -> min_p -> top_k -> top_p
-> draw. Greedy rows skip everything but the mask.

Randomness is counter-based: the draw for completion token i of a request is a hash of (its seed, i). So it depends neither
on the company, nor on preemption or chunking, and there is no generator to save.
"""

import struct
from collections.abc import Collection
from collections.abc import Sequence as SequenceABC

import torch
import xxhash
from torch import Tensor

import minivllm_kernels as kernels
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.sampling_parameters import SamplingParams

__all__ = ["GREEDY_BELOW", "filter_probabilities", "sample", "uniform"]

# Below this temperature the distribution is a single spike in float32; taken as greedy, as vLLM does.
GREEDY_BELOW = 1e-5
# Tokens below this share of the most likely one are looked at only when the others do not reach top_p.
NUCLEUS_FLOOR = 1e-3


def sample(logits: Tensor, seqs: SequenceABC[Sequence], end_token_ids: Collection[int]) -> list[int]:
    """Choose one token a row.

    Args:
        logits: float32 ``[S, V]``; rows below ``min_tokens`` are masked in place.
        seqs: the sequence of each row.
        end_token_ids: what ends a sequence that does not ignore EOS.

    Returns:
        S token ids; ``FAILED_TOKEN`` for a row with NaN, +inf or nothing but -inf. Other rows are not disturbed by it.
    """
    for row, seq in enumerate(seqs):
        if seq.num_completion_tokens < seq.sampling_params.min_tokens:
            ends = _end_ids(seq, end_token_ids, logits.shape[1])
            logits[row, ends] = float("-inf")
    best = kernels.argmax(logits)
    peaks = logits.gather(1, best.unsqueeze(1)).squeeze(1)
    # One transfer for the whole batch: torch.argmax reports a NaN as the largest, so a bad row shows in its peak.
    tokens, healthy = best.tolist(), torch.isfinite(peaks).tolist()
    for row, seq in enumerate(seqs):
        if not healthy[row]:
            tokens[row] = FAILED_TOKEN
        elif seq.sampling_params.temperature >= GREEDY_BELOW:
            tokens[row] = _draw(logits[row], peaks[row], seq)
    return tokens


def filter_probabilities(probabilities: Tensor, params: SamplingParams) -> Tensor:
    """Zero what min_p, top_k and top_p leave out of ``probabilities [V]``; not renormalised. The most likely token stays."""
    if params.min_p > 0.0:
        probabilities = probabilities.where(probabilities >= params.min_p * probabilities.max(), 0.0)
    top_k = params.top_k if 0 < params.top_k < probabilities.numel() else 0
    if not top_k and params.top_p == 1.0:
        return probabilities
    # Ties fall to the lower token id: candidates keep their order, and the sort is stable.
    candidates = _candidates(probabilities, top_k, params.top_p).nonzero().squeeze(1)
    ordered, order = probabilities[candidates].sort(descending=True, stable=True)
    if top_k:
        ordered, order = ordered[:top_k], order[:top_k]
    if params.top_p < 1.0:
        total = ordered.double().sum() if top_k else probabilities.double().sum()
        before = ordered.double().cumsum(0) - ordered.double()  # mass of the more likely ones: keep while short of top_p
        keep = before < params.top_p * total
        keep[0] = True
        ordered, order = ordered[keep], order[keep]
    return torch.zeros_like(probabilities).scatter_(0, candidates[order], ordered)


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that belongs to draw ``index`` of ``seed``."""
    digest = xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, index))
    return float(digest >> 11) / float(1 << 53)


def _candidates(probabilities: Tensor, top_k: int, top_p: float) -> Tensor:
    """A mask that holds every token that can survive: sorting a whole vocabulary would cost more than the rest of a step."""
    if top_k:
        return probabilities >= probabilities.topk(top_k).values[-1]
    likely = probabilities >= probabilities.max() * NUCLEUS_FLOOR
    enough = probabilities.where(likely, 0.0).double().sum() >= top_p * probabilities.double().sum()
    return likely if bool(enough) else torch.ones_like(likely)


def _draw(logits: Tensor, peak: Tensor, seq: Sequence) -> int:
    params = seq.sampling_params
    # The peak is taken off first, so that dividing by a small temperature cannot overflow.
    probabilities = torch.softmax((logits - peak) / params.temperature, dim=-1)
    cumulative = filter_probabilities(probabilities, params).double().cumsum(0)
    target = uniform(seq.sampling_seed, seq.num_completion_tokens) * cumulative[-1]
    # right=True: the first token whose cumulative mass is above the target, so a token of no mass is never drawn.
    token = int(torch.searchsorted(cumulative, target, right=True))
    return token if token < logits.shape[0] else int(cumulative.argmax())  # rounding: the last token that has any mass


def _end_ids(seq: Sequence, end_token_ids: Collection[int], vocab_size: int) -> list[int]:
    ends = set(seq.sampling_params.stop_token_ids or ())
    if not seq.ignore_eos:
        ends.update(end_token_ids)
    return [token for token in ends if 0 <= token < vocab_size]
