"""Attention of one new token a sequence over the paged cache: plain torch, a naive Triton kernel, this project's op, flash-attn.

    python benchmarks/bench_attention_decode.py --work 1x512 256x1024

``--work 16x256`` is sixteen sequences, each with 256 tokens in the cache, the new one among them. GB per second are of the keys
and values read once, the least that must move. flash-attn gets keys and values side by side, which is less work than a paged
cache: its own takes no blocks of 16. Without a GPU only plain torch and the reference are timed.
"""

from collections.abc import Callable, Sequence

import torch
from attention_contest import Batch, Contestant, attention_options, has_flash_attn, has_triton, run_contest
from torch import Tensor

from minivllm_kernels import reference


def main(arguments: Sequence[str] | None = None) -> None:
    options = attention_options(__doc__, arguments)
    contestants: dict[str, Contestant] = {"plain torch": _plain, "reference": _reference}
    absent = {}
    if (why := has_triton(options.device)) is None:
        contestants |= {"naive triton": _naive, "ours": _ours}
    else:
        absent |= {"naive triton": why, "ours": why}
    if (why := has_flash_attn(options.device)) is None and options.dtype != "float32":
        contestants["flash-attn, contiguous"] = _flash
    else:
        absent["flash-attn"] = why or "it has no float32"
    run_contest(
        "attention-decode",
        options,
        contestants,
        absent,
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


def _reference(batch: Batch) -> Callable[[], Tensor]:
    return lambda: reference.attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.scale)


def _ours(batch: Batch) -> Callable[[], Tensor]:
    from minivllm_kernels.triton.attention import attention

    return lambda: attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.scale)


def _naive(batch: Batch) -> Callable[[], Tensor]:
    from naive_attention import naive_attention

    return lambda: naive_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.scale)


def _flash(batch: Batch) -> Callable[[], Tensor]:
    from flash_attn import flash_attn_with_kvcache

    q, lengths = batch.q.unsqueeze(1), batch.metadata.lengths
    return lambda: flash_attn_with_kvcache(
        q, batch.keys, batch.values, cache_seqlens=lengths, softmax_scale=batch.scale, causal=True
    ).squeeze(1)


if __name__ == "__main__":
    main()
