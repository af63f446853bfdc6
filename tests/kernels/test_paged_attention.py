"""Storing to and attending over the paged cache, against loops that read slot by slot (trials J01, J03)."""

import pytest
import torch
from paged_batches import BATCHES, attention_loop, paged_batch, poisoned
from torch import Tensor

import minivllm_kernels as kernels
from minivllm_kernels import AttentionMetadata, reference

# (query heads, key heads, head size): none a power of two where the kernels of others assume one.
SHAPES = [(9, 3, 64), (4, 1, 80), (6, 2, 96), (4, 1, 256), (5, 5, 6)]
DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def close(got: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    assert got.dtype == dtype
    tolerance = DTYPES[dtype]
    torch.testing.assert_close(got.double(), expected.double(), atol=tolerance, rtol=tolerance)


# The paged cache


@pytest.mark.parametrize("shape", SHAPES)
def test_store_kv_writes_the_named_slots_and_skips_negative_ones(shape: tuple[int, int, int]) -> None:
    _, kv_heads, dim = shape
    k_cache, v_cache = poisoned(4, 3, kv_heads, dim)
    k, v = torch.randn(4, kv_heads, dim), torch.randn(4, kv_heads, dim)
    kernels.store_kv(k, v, k_cache, v_cache, torch.tensor([10, -1, 0, -7]))
    for cache, values in ((k_cache, k), (v_cache, v)):
        flat = cache.view(12, kv_heads, dim)
        assert torch.equal(flat[10], values[0])
        assert torch.equal(flat[0], values[2])
        assert flat[[1, 2, 3, 4, 5, 6, 7, 8, 9, 11]].isnan().all()


def test_padding_rows_never_reach_the_last_slot() -> None:
    """Trials J01: -1 as an index would mean the last slot."""
    k_cache, v_cache = torch.zeros(2, 4, 1, 2), torch.zeros(2, 4, 1, 2)
    ones = torch.ones(3, 1, 2)
    kernels.store_kv(ones, ones, k_cache, v_cache, torch.tensor([5, -1, -1]))
    written = k_cache.view(8, 2).sum(-1).nonzero().flatten().tolist()
    assert written == [5]
    kernels.store_kv(ones, ones, k_cache, v_cache, torch.tensor([-1, -1, -1]))
    assert v_cache.view(8, 2).sum(-1).nonzero().flatten().tolist() == [5]


def test_a_shrinking_batch_with_static_buffers_touches_live_slots_only() -> None:
    """Trials J01: batches of 4, 3 and 1 through one buffer of 4 rows whose padding says -1."""
    k_cache, v_cache = torch.zeros(4, 4, 1, 1), torch.zeros(4, 4, 1, 1)
    slots = torch.full((4,), -1)
    for step, live in enumerate([[0, 4, 8, 12], [1, 5, 9], [2]], start=1):
        slots.fill_(-1)
        slots[: len(live)] = torch.tensor(live)
        before = k_cache.clone()
        values = torch.full((4, 1, 1), float(step))
        kernels.store_kv(values, values, k_cache, v_cache, slots)
        assert (k_cache != before).flatten().nonzero().flatten().tolist() == live


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_store_kv_converts_to_the_cache(cache_dtype: torch.dtype) -> None:
    k_cache, v_cache = poisoned(1, 2, 1, 4, dtype=cache_dtype)
    k = torch.randn(1, 1, 4)
    kernels.store_kv(k, k + 1, k_cache, v_cache, torch.tensor([1]))
    assert torch.equal(k_cache[0, 1], k[0].to(cache_dtype))
    assert torch.equal(v_cache[0, 1], (k + 1)[0].to(cache_dtype))


def test_store_kv_takes_slices_of_a_wider_tensor() -> None:
    """The model's v is a slice of the merged projection: its rows are not contiguous."""
    k_cache, v_cache = poisoned(1, 4, 2, 3)
    merged = torch.randn(4, 18)
    k, v = merged[:, 6:12].unflatten(-1, (2, 3)), merged[:, 12:].unflatten(-1, (2, 3))
    kernels.store_kv(k, v, k_cache, v_cache, torch.tensor([3, 2, 1, 0]))
    assert torch.equal(v_cache[0], v.flip(0))


# Attention


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape: tuple[int, int, int], batch: str) -> None:
    q, k_cache, v_cache, metadata = paged_batch(shape, *BATCHES[batch], block_size=4, dtype=torch.float32)
    got = kernels.attention(q, k_cache, v_cache, metadata, 0.3)
    close(got, attention_loop(q, k_cache, v_cache, metadata, 0.3))


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_attention_with_any_block_size(block_size: int) -> None:
    q, k_cache, v_cache, metadata = paged_batch((9, 3, 64), *BATCHES["mixed"], block_size=block_size, dtype=torch.float32)
    close(kernels.attention(q, k_cache, v_cache, metadata, 0.125), attention_loop(q, k_cache, v_cache, metadata, 0.125))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_attention_in_half_precision(dtype: torch.dtype) -> None:
    q, k_cache, v_cache, metadata = paged_batch((6, 2, 96), *BATCHES["mixed"], block_size=4, dtype=dtype)
    close(kernels.attention(q, k_cache, v_cache, metadata, 0.1), attention_loop(q, k_cache, v_cache, metadata, 0.1), dtype)


def test_attention_over_a_cache_of_another_type() -> None:
    q, k_cache, v_cache, metadata = paged_batch((4, 2, 16), *BATCHES["mixed"], block_size=4, dtype=torch.bfloat16)
    got = kernels.attention(q.float(), k_cache, v_cache, metadata, 0.25)
    close(got, attention_loop(q, k_cache, v_cache, metadata, 0.25))


@pytest.mark.parametrize("limit", [1, 3000, 10**9])
def test_the_size_of_decode_groups_changes_nothing(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "GATHER_LIMIT_BYTES", limit)
    q, k_cache, v_cache, metadata = paged_batch((4, 2, 16), [1] * 6, [3, 30, 14, 1, 31, 15], block_size=4, dtype=torch.float32)
    close(kernels.attention(q, k_cache, v_cache, metadata, 0.25), attention_loop(q, k_cache, v_cache, metadata, 0.25))


def test_a_row_is_the_same_alone_and_in_company() -> None:
    q, k_cache, v_cache, metadata = paged_batch((4, 2, 16), *BATCHES["mixed"], block_size=4, dtype=torch.float32)
    together = kernels.attention(q, k_cache, v_cache, metadata, 0.25)
    start = 0
    for b, (new, total) in enumerate(zip(metadata.query_lens, metadata.seq_lens or (), strict=True)):
        alone = AttentionMetadata.build([new], [total], [metadata.block_tables[b].tolist()], 4)
        got = kernels.attention(q[start : start + new], k_cache, v_cache, alone, 0.25)
        close(together[start : start + new], got.double())
        start += new


def test_slots_beyond_two_to_the_31_elements() -> None:
    """Trials J03: slot 4,000,000 of 3 heads of 256 starts at element 3,072,000,000. Only the pages touched take memory."""
    try:
        cache = torch.empty(250_001, 16, 3, 256, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("no 6 GB of address space")
    metadata = AttentionMetadata.build([1], [1], [[250_000]], 16)
    assert metadata.slot_mapping.tolist() == [4_000_000]
    value = torch.randn(1, 3, 256).half()
    kernels.store_kv(value, value, cache, cache, metadata.slot_mapping)
    assert torch.equal(cache[250_000, 0], value[0])
    out = kernels.attention(torch.randn(1, 9, 256).half(), cache, cache, metadata, 0.1)
    torch.testing.assert_close(out, value.repeat_interleave(3, dim=1))


# Metadata


def test_metadata_maps_positions_to_slots() -> None:
    metadata = AttentionMetadata.build([2, 1], [6, 3], [[7, 2], [5]], 4)
    assert metadata.slot_mapping.tolist() == [2 * 4 + 0, 2 * 4 + 1, 5 * 4 + 2]
    assert metadata.block_tables.tolist() == [[7, 2], [5, 0]]
    assert metadata.slot_mapping.dtype == metadata.block_tables.dtype == torch.int64


def test_metadata_refuses_lists_of_different_length() -> None:
    with pytest.raises(ValueError, match="argument"):
        AttentionMetadata.build([1, 1], [1], [[0], [1]], 4)
