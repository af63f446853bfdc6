"""A stand-in for flash-attn: the signatures, checks and results of both its versions, in plain torch, on any device.

The checks are those of flash_api.cpp of each version (github.com/Dao-AILab/flash-attention, csrc/flash_attn and hopper). Calls
are recorded by function and by shape.
"""

import types
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

__all__ = ["fake_flash_attn_2", "fake_flash_attn_3"]


def fake_flash_attn_2(calls: list[tuple[str, tuple[int, ...]]]) -> types.ModuleType:
    module = types.ModuleType("flash_attn")

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: Tensor | None = None,
    ) -> Tensor:
        calls.append(("varlen", tuple(q.shape)))
        assert dropout_p == 0.0
        check(q, k, v, block_table, page_multiple=256)
        starts_of_keys = int32_vector(cu_seqlens_k, block_table.shape[0] + 1)  # type: ignore[union-attr]
        lengths = starts_of_keys.diff()
        assert int(lengths.max()) <= max_seqlen_k
        return varlen(q, k, v, block_table, cu_seqlens_q, lengths, max_seqlen_q, softmax_scale, causal)

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: None = None,
        v: None = None,
        rotary_cos: None = None,
        rotary_sin: None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: None = None,
        cache_leftpad: None = None,
        block_table: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        calls.append(("with_kvcache", tuple(q.shape)))
        check(q, k_cache, v_cache, block_table, page_multiple=256)
        return batched(q, k_cache, v_cache, block_table, cache_seqlens, softmax_scale, causal)

    module.__version__ = "2.8.3"  # type: ignore[attr-defined]
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    return module


def fake_flash_attn_3(calls: list[tuple[str, tuple[int, ...]]]) -> types.ModuleType:
    module = types.ModuleType("flash_attn_interface")

    def flash_attn_with_kvcache(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: None = None,
        v: None = None,
        qv: None = None,
        cache_seqlens: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        max_seqlen_q: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> Tensor:
        calls.append(("with_kvcache", tuple(q.shape)))
        check(q, k_cache, v_cache, page_table, page_multiple=1)
        if cu_seqlens_q is None:
            return batched(q, k_cache, v_cache, page_table, cache_seqlens, softmax_scale, causal)
        assert max_seqlen_q is not None, "max_seqlen_q must be provided if cu_seqlens_q is provided"
        lengths = int32_vector(cache_seqlens, cu_seqlens_q.numel() - 1)
        return varlen(q, k_cache, v_cache, page_table, cu_seqlens_q, lengths, max_seqlen_q, softmax_scale, causal)

    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    return module


def check(q: Tensor, k: Tensor, v: Tensor, table: Tensor | None, page_multiple: int) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16), "only fp16 and bf16"
    assert k.dtype == v.dtype == q.dtype
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1, "the last dimension must be contiguous"
    assert k.dim() == 4, "a paged cache is [num_blocks, page_block_size, nheads_k, headdim]"
    assert k.shape == v.shape
    assert k.shape[-1] == q.shape[-1] <= 256
    assert q.shape[-1] % 8 == 0
    assert q.shape[-2] % k.shape[-2] == 0
    assert k.shape[1] % page_multiple == 0, "Paged KV cache block size must be divisible by 256"
    assert table is not None
    assert (table.dtype, table.dim(), table.stride(-1)) == (torch.int32, 2, 1)


def int32_vector(lengths: Any, size: int) -> Tensor:
    assert isinstance(lengths, Tensor)
    assert (lengths.dtype, tuple(lengths.shape), lengths.is_contiguous()) == (torch.int32, (size,), True)
    return lengths


def batched(q: Tensor, k: Tensor, v: Tensor, table: Any, lengths: Any, scale: float | None, causal: bool) -> Tensor:
    assert q.dim() == 4, "q is (batch_size, seqlen, nheads, headdim)"
    assert table.shape[0] == q.shape[0]
    lengths = int32_vector(lengths, q.shape[0]).tolist()
    return torch.stack([one(q[b], k, v, table[b], lengths[b], scale, causal) for b in range(q.shape[0])])


def varlen(
    q: Tensor, k: Tensor, v: Tensor, table: Any, starts: Any, lengths: Tensor, longest: int, scale: float | None, causal: bool
) -> Tensor:
    assert q.dim() == 3, "q is (total_q, nheads, headdim)"
    firsts = int32_vector(starts, table.shape[0] + 1).tolist()
    assert firsts[-1] == q.shape[0]
    assert max(b - a for a, b in pairwise(firsts)) <= longest
    rows = [one(q[a:b], k, v, table[i], int(lengths[i]), scale, causal) for i, (a, b) in enumerate(pairwise(firsts))]
    return torch.cat(rows)


def one(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, length: int, scale: float | None, causal: bool) -> Tensor:
    """A sequence: q ``[Q, H, D]`` at the end of ``length`` keys. A row without keys gives zeros."""
    if length == 0:
        return torch.zeros_like(q)
    used = blocks[: -(-length // k.shape[1])].long()
    group = q.shape[1] // k.shape[2]
    keys, values = (x[used].flatten(0, 1)[:length].float().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        late = torch.arange(length) > torch.arange(q.shape[0]).unsqueeze(1) + length - q.shape[0]
        scores = scores.masked_fill(late, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), values).to(q.dtype)
