"""Next tokens chosen where the logits are, so that nobody waits for them: greedy rows and drawn rows.

Only for requests whose choice needs nothing from the host: no adjustments, no processors, no log-probabilities. The others
go through :mod:`minivllm_plugin.runner.sampler`; both choose the same tokens.
"""

from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import minivllm_kernels as kernels
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.runner.sampler import GREEDY_BELOW, draw_of

if TYPE_CHECKING:
    from minivllm_plugin.extensions.logits_pipeline import LogitsPipeline

__all__ = ["choose", "choose_greedy", "is_device_only", "is_greedy"]


def is_device_only(seq: Sequence, processors: "LogitsPipeline | None") -> bool:
    """Whether the host is not needed between this sequence's logits and its token."""
    params = seq.sampling_params
    if params.adjusts_logits or params.logprobs is not None or params.prompt_logprobs is not None or seq.pooling is not None:
        return False
    return processors is None or not params.extra_args


def is_greedy(seq: Sequence) -> bool:
    """Whether it takes the most likely token."""
    return seq.sampling_params.temperature < GREEDY_BELOW


def choose_greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row of float32 ``[S, V]`` -> int64 ``[S]``.

    ``FAILED_TOKEN`` for a row with NaN, +inf or nothing but -inf: argmax reports a NaN as the largest, so that a bad row shows
    in its peak.
    """
    best = kernels.argmax(logits)
    return torch.where(torch.isfinite(logits.gather(1, best.unsqueeze(1)).squeeze(1)), best, FAILED_TOKEN)


def choose(logits: Tensor, seqs: SequenceABC[Sequence]) -> Tensor:
    """One token a row of float32 ``logits [S, V]``, each as its sequence says -> int64 ``[S]``, or ``FAILED_TOKEN``."""
    tokens = choose_greedy(logits)
    random = [row for row, seq in enumerate(seqs) if not is_greedy(seq)]
    if not random:
        return tokens
    rows = torch.tensor(random, device=logits.device)
    # A failed row is drawn from, too, since only the device knows it; zeros keep it harmless.
    healthy = (tokens >= 0).index_select(0, rows)
    candidates = torch.where(healthy.unsqueeze(1), logits.index_select(0, rows), 0.0)
    drawn = kernels.sample(candidates, [draw_of(seqs[row]) for row in random])
    return tokens.index_copy(0, rows, torch.where(healthy, drawn, FAILED_TOKEN))
