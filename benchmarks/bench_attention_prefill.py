"""Attention of whole prompts over the paged cache: plain torch, a naive Triton kernel, the op of this project, flash-attn.

    python benchmarks/bench_attention_prefill.py --work 16x256 4x2048

``--work 4x2048`` is four prompts of 2048 tokens, all of them new. flash-attn gets keys and values side by side, which is less
work than a paged cache: its own takes no blocks of 16. Without a GPU only plain torch and the reference are timed.
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
        "attention-prefill",
        options,
        contestants,
        absent,
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


def _reference(batch: Batch) -> Callable[[], Tensor]:
    return lambda: reference.attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.scale)


def _ours(batch: Batch) -> Callable[[], Tensor]:
    from minivllm_kernels.triton.attention import attention

    return lambda: attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.scale)


def _naive(batch: Batch) -> Callable[[], Tensor]:
    from naive_attention import naive_attention

    return lambda: naive_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.scale)


def _flash(batch: Batch) -> Callable[[], Tensor]:
    from flash_attn import flash_attn_varlen_func

    starts = batch.metadata.query_starts
    k, v = batch.keys.flatten(0, 1), batch.values.flatten(0, 1)
    longest = batch.length
    return lambda: flash_attn_varlen_func(batch.q, k, v, starts, starts, longest, longest, softmax_scale=batch.scale, causal=True)


if __name__ == "__main__":
    main()
