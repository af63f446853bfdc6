"""Next tokens chosen where the logits are, so that nobody waits for them: greedy rows and drawn rows.

Only for requests whose choice needs nothing from the host: no adjustments, no processors, no log-probabilities. The others
go through :mod:`minivllm_plugin.runner.sampler`; both choose the same tokens.
"""

from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import minivllm_kernels as kernels
from minivllm_kernels import DrawTensors, TokenDraw, reference
from minivllm_kernels.dispatch import implementation
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.runner.sampler import GREEDY_BELOW, draw_of

if TYPE_CHECKING:
    from minivllm_plugin.extensions.logits_pipeline import LogitsPipeline

__all__ = ["GREEDY", "choose", "choose_greedy", "draws_of", "is_device_only", "is_greedy", "samples_on_the_device"]

GREEDY = TokenDraw(0.0, temperature=0.0)


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
    return best.masked_fill(~torch.isfinite(logits.gather(1, best.unsqueeze(1)).squeeze(1)), FAILED_TOKEN)


def draws_of(seqs: SequenceABC[Sequence]) -> list[TokenDraw]:
    """What :func:`minivllm_kernels.sample_rows` is to do in the row of each sequence."""
    return [GREEDY if is_greedy(seq) else draw_of(seq) for seq in seqs]


def choose(logits: Tensor, seqs: SequenceABC[Sequence]) -> Tensor:
    """One token a row of float32 ``logits [S, V]``, each as its sequence says -> int64 ``[S]``, or ``FAILED_TOKEN``."""
    if all(map(is_greedy, seqs)):
        return choose_greedy(logits)
    return kernels.sample_rows(logits, DrawTensors.build(draws_of(seqs), logits.device))


def samples_on_the_device(device: torch.device) -> bool:
    """Whether drawing needs nothing from the host in the backends that are in use, so that it can be captured."""
    function = implementation("sample_rows", device.type)
    return function is not reference.sample_rows
