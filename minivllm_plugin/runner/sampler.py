"""From logits to the next token of each row, every row on its own.

Order of the steps, equal to vLLM's: log-probabilities of the raw logits -> the request's own adjustments
(:mod:`minivllm_plugin.runner.adjustments`) -> logits processors -> temperature -> min_p -> top_k -> top_p -> draw. Greedy rows
skip what comes after the processors.

Randomness is counter-based: the draw for completion token i of a request is a hash of (its seed, i). So it depends neither
on the company, nor on preemption or chunking, and there is no generator to save.
"""

import struct
from collections.abc import Collection
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

import minivllm_kernels as kernels
from minivllm_kernels.draws import TokenDraw
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.runner.adjustments import adjust_logits
from minivllm_plugin.runner.logprobs import RawLogprobs

if TYPE_CHECKING:
    from minivllm_plugin.extensions.logits_pipeline import LogitsPipeline

__all__ = ["GREEDY_BELOW", "draw_of", "sample", "uniform"]

# Below this temperature the distribution is a single spike in float32; taken as greedy, as vLLM does.
GREEDY_BELOW = 1e-5


def sample(
    logits: Tensor,
    seqs: SequenceABC[Sequence],
    end_token_ids: Collection[int],
    processors: "LogitsPipeline | None" = None,
) -> list[int]:
    """Choose one token a row.

    Args:
        logits: float32 ``[S, V]``; masked and processed in place.
        seqs: the sequence of each row; one that asks for log-probabilities gets those of its token appended. One that stands in
            several rows, side by side, has its next token chosen in the first of them, the one after that in the second, …
        end_token_ids: what ends a sequence that does not ignore EOS.
        processors: of plugins, for the rows that ask for them.

    Returns:
        S token ids; ``FAILED_TOKEN`` for a row with NaN, +inf or nothing but -inf. Other rows are not disturbed by it.
    """
    raw = RawLogprobs(logits, seqs)
    adjust_logits(logits, seqs, end_token_ids)
    if processors is not None:
        processors.apply(logits, seqs)
    best = kernels.argmax(logits)
    peaks = logits.gather(1, best.unsqueeze(1)).squeeze(1)
    # One transfer for the whole batch: torch.argmax reports a NaN as the largest, so a bad row shows in its peak.
    tokens, healthy = best.tolist(), torch.isfinite(peaks).tolist()
    random = [row for row, seq in enumerate(seqs) if healthy[row] and seq.sampling_params.temperature >= GREEDY_BELOW]
    if random:
        rows = logits if len(random) == len(seqs) else logits[random]
        # A sequence with drafts stands in several rows side by side, so the place among these is what has come after its newest.
        draws = [draw_of(seqs[row], row - seqs.index(seqs[row]) if seqs[row].draft_token_ids else 0) for row in random]
        for row, token in zip(random, kernels.sample(rows, draws).tolist(), strict=True):
            tokens[row] = token
    tokens = [token if fine else FAILED_TOKEN for token, fine in zip(tokens, healthy, strict=True)]
    for row, logprobs in raw.of(tokens).items():
        seqs[row].logprobs.append(logprobs)
    return tokens


def uniform(seed: int, index: int) -> float:
    """The number in [0, 1) that belongs to draw ``index`` of ``seed``."""
    digest = xxhash.xxh3_64_intdigest(struct.pack("<QQ", seed, index))
    return float(digest >> 11) / float(1 << 53)


def draw_of(seq: Sequence, ahead: int = 0) -> TokenDraw:
    """How the token after the next ``ahead`` tokens of ``seq`` is drawn; one that is pending counts as known."""
    params = seq.sampling_params
    place = uniform(seq.sampling_seed, seq.num_completion_tokens + seq.num_pending_tokens + ahead)
    return TokenDraw(place, params.temperature, max(params.top_k, 0), params.top_p, params.min_p)
