"""Attention of one new token a sequence over the paged cache: plain torch, a naive Triton kernel, this project's op, flash-attn.

    python benchmarks/bench_attention_decode.py --work 1x512 256x1024

``--work 16x256`` is sixteen sequences, each with 256 tokens in the cache, the new one among them. GB per second are of the keys
and values read once, the least that must move. flash-attn gets keys and values side by side, which is less work than a paged
cache: its own takes no blocks of 16. Without a GPU only plain torch and the reference are timed.
"""

from collections.abc import Callable, Sequence

import torch
from attention_contest import Batch, attention_options, run_contest
from torch import Tensor


def main(arguments: Sequence[str] | None = None) -> None:
    options = attention_options(__doc__, arguments)
    run_contest(
        "attention-decode",
        options,
        _plain,
        _flash,
        lambda count, length: Batch.random(options, count, length, 1),
        lambda batch: ("GB_per_s", (batch.keys.nbytes + batch.values.nbytes) / 1e9),
    )


def _plain(batch: Batch) -> Callable[[], Tensor]:
    """All scores at once over keys side by side, repeated for each head of a group."""

    def call() -> Tensor:
        q = batch.q.unsqueeze(2)
        k, v = (x.repeat_interleave(batch.group, dim=2).transpose(1, 2) for x in (batch.keys, batch.values))
        weights = torch.softmax((q @ k.transpose(2, 3) * batch.scale).float(), dim=-1).to(v.dtype)
        return (weights @ v).squeeze(2)

    return call


def _flash(batch: Batch) -> Callable[[], Tensor]:
    from flash_attn import flash_attn_with_kvcache

    q, lengths = batch.q.unsqueeze(1), batch.metadata.lengths
    return lambda: flash_attn_with_kvcache(
        q, batch.keys, batch.values, cache_seqlens=lengths, softmax_scale=batch.scale, causal=True
    ).squeeze(1)


if __name__ == "__main__":
    main()
