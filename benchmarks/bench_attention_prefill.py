"""Attention of whole prompts over the paged cache: plain torch, a naive Triton kernel, the op of this project, flash-attn.

    python benchmarks/bench_attention_prefill.py --work 16x256 4x2048

``--work 4x2048`` is four prompts of 2048 tokens, all of them new. flash-attn gets keys and values side by side, which is less
work than a paged cache: its own takes no blocks of 16. Without a GPU only plain torch and the reference are timed.
"""

from collections.abc import Callable, Sequence

import torch
from attention_contest import Batch, attention_options, run_contest
from torch import Tensor


def main(arguments: Sequence[str] | None = None) -> None:
    options = attention_options(__doc__, arguments)
    run_contest(
        "attention-prefill",
        options,
        _plain,
        _flash,
        lambda count, length: Batch.random(options, count, length, length),
        lambda batch: ("T_multiply_adds_per_s", _multiply_adds(batch) / 1e12),
    )


def _multiply_adds(batch: Batch) -> float:
    """Of both products, for each pair of a token and one that it sees."""
    return 2 * batch.q.shape[1] * batch.q.shape[2] * batch.count * batch.length * (batch.length + 1) / 2


def _plain(batch: Batch) -> Callable[[], Tensor]:
    """All scores at once, masked; keys are repeated for each head of a group."""
    hidden = torch.ones(batch.new, batch.length, dtype=torch.bool, device=batch.q.device).triu(1)
    shape = (batch.count, batch.new, *batch.q.shape[1:])

    def call() -> Tensor:
        q = batch.q.view(shape).transpose(1, 2)
        k, v = (x.repeat_interleave(batch.group, dim=2).transpose(1, 2) for x in (batch.keys, batch.values))
        scores = (q @ k.transpose(2, 3) * batch.scale).masked_fill(hidden, float("-inf"))
        return (torch.softmax(scores.float(), dim=-1).to(v.dtype) @ v).transpose(1, 2).reshape(batch.q.shape)

    return call


def _flash(batch: Batch) -> Callable[[], Tensor]:
    from flash_attn import flash_attn_varlen_func

    starts = batch.metadata.query_starts
    k, v = batch.keys.flatten(0, 1), batch.values.flatten(0, 1)
    longest = batch.length
    return lambda: flash_attn_varlen_func(batch.q, k, v, starts, starts, longest, longest, softmax_scale=batch.scale, causal=True)


if __name__ == "__main__":
    main()
