"""Storing, alone and behind norm and rotation: only live slots change, in every format, at any offset (trials J01, J03)."""

import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm_kernels import reference
from minivllm_kernels.triton.norm_rotary_store import norm_rotary_store
from minivllm_kernels.triton.store_kv import slot_offset, store_kv

# (query heads, KV heads, head size), as models have them and as tests of others forget them.
HEADS = [(9, 3, 64), (4, 1, 80), (6, 2, 96), (4, 1, 256), (5, 5, 6), (3, 3, 16)]
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2]
SLOTS = [17, -1, 4, 5, -1]
NUM_BLOCKS, BLOCK_SIZE = 5, 4
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits(x: Tensor) -> Tensor:
    """What is there, NaN included."""
    return x.view(BITS[x.element_size()])


def poisoned(k_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
    return torch.full((NUM_BLOCKS, BLOCK_SIZE, k_heads, head_dim), torch.nan).to(dtype)


def projection(tokens: int, heads: tuple[int, int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the model has them: views of one matrix."""
    q_heads, k_heads, head_dim = heads
    qkv = (torch.randn(tokens, (q_heads + 2 * k_heads) * head_dim) * 2).to(dtype)
    q, k, v = qkv.split([q_heads * head_dim, k_heads * head_dim, k_heads * head_dim], dim=1)
    return q.unflatten(1, (q_heads, head_dim)), k.unflatten(1, (k_heads, head_dim)), v.unflatten(1, (k_heads, head_dim))


def only_live_slots_changed(cache: Tensor, before: Tensor, slots: list[int]) -> None:
    live = {slot for slot in slots if slot >= 0}
    flat, old = bits(cache).flatten(0, 1), bits(before).flatten(0, 1)
    changed = {slot for slot in range(flat.shape[0]) if not torch.equal(flat[slot], old[slot])}
    assert changed == live


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        *((dtype, dtype) for dtype in TOLERANCES),
        (torch.float32, torch.bfloat16),
        *((torch.bfloat16, float8) for float8 in FLOAT8),
    ],
)
@pytest.mark.parametrize("heads", HEADS)
def test_store_kv_writes_live_slots_and_nothing_else(
    heads: tuple[int, int, int], dtype: torch.dtype, cache_dtype: torch.dtype
) -> None:
    _, k, v = projection(len(SLOTS), heads, dtype)
    caches = [poisoned(heads[1], heads[2], cache_dtype) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    store_kv(k, v, caches[0], caches[1], torch.tensor(SLOTS))
    for x, cache, old in zip((k, v), caches, before, strict=True):
        only_live_slots_changed(cache, old, SLOTS)
        for token, slot in enumerate(SLOTS):
            if slot >= 0:
                assert torch.equal(bits(cache.flatten(0, 1)[slot]), bits(x[token].to(cache_dtype)))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("heads", HEADS)
def test_norm_rotary_store(heads: tuple[int, int, int], norm: bool, dtype: torch.dtype) -> None:
    q, k, v = projection(len(SLOTS), heads, dtype)
    head_dim = heads[2]
    weights = [torch.randn(head_dim).to(dtype) for _ in range(2)] if norm else [None, None]
    arguments: list[Any] = [q, k, v, torch.tensor([3, 0, 29, 7, 0]), torch.randn(30, head_dim)]
    ours, theirs = ([poisoned(heads[1], head_dim, dtype) for _ in range(2)] for _ in range(2))
    slots = torch.tensor(SLOTS)
    inputs = [tensor.clone() for tensor in arguments]
    out = norm_rotary_store(*arguments, *ours, slots, *weights, 1e-5)
    expected = reference.norm_rotary_store(*arguments, *theirs, slots, *weights, 1e-5)
    assert out.is_contiguous()
    assert out.dtype == dtype
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(out.float(), expected.float(), atol=tolerance, rtol=tolerance)
    for got, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got.float(), right.float(), atol=tolerance, rtol=tolerance, equal_nan=True)
        only_live_slots_changed(got, poisoned(heads[1], head_dim, dtype), SLOTS)
    for tensor, old in zip(arguments, inputs, strict=True):
        assert torch.equal(tensor, old)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_the_shape_and_the_slots_nothing_else_changes(seed: int) -> None:
    """Random heads and sizes, a cache that is already full, and any number of padded rows anywhere."""
    draw = random.Random(seed)
    k_heads, head_dim = draw.randint(1, 5), 2 * draw.randint(1, 40)
    heads = (k_heads * draw.randint(1, 3), k_heads, head_dim)
    live = draw.sample(range(NUM_BLOCKS * BLOCK_SIZE), draw.randint(0, 4))
    slots = [*live, *[-draw.randint(1, 9) for _ in range(draw.randint(0, 3))]]
    draw.shuffle(slots)
    q, k, v = projection(len(slots), heads, torch.float32)
    caches = [torch.randn(NUM_BLOCKS, BLOCK_SIZE, k_heads, head_dim) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    if draw.random() < 0.5:
        store_kv(k, v, caches[0], caches[1], torch.tensor(slots, dtype=torch.int64))
    else:
        positions = torch.tensor([draw.randrange(30) for _ in slots], dtype=torch.int64)
        table, where = torch.randn(30, head_dim), torch.tensor(slots, dtype=torch.int64)
        norm_rotary_store(q, k, v, positions, table, caches[0], caches[1], where)
    for cache, old in zip(caches, before, strict=True):
        only_live_slots_changed(cache, old, slots)


@pytest.mark.parametrize("cache_dtype", FLOAT8)
def test_norm_rotary_store_into_eight_bits_with_scales(cache_dtype: torch.dtype) -> None:
    """What is stored is the rotated key in the model's dtype, divided by the scale: exactly."""
    q, k, v = projection(len(SLOTS), (4, 2, 20), torch.bfloat16)
    positions, table, slots = torch.tensor([3, 0, 29, 7, 0]), torch.randn(30, 20), torch.tensor(SLOTS)
    plain, stored = ([poisoned(2, 20, dtype) for _ in range(2)] for dtype in (torch.bfloat16, cache_dtype))
    out = norm_rotary_store(q, k, v, positions, table, *plain, slots)
    assert torch.equal(out, norm_rotary_store(q, k, v, positions, table, *stored, slots, k_scale=0.25, v_scale=2.0))
    for cache, exact, scale in zip(stored, plain, (0.25, 2.0), strict=True):
        only_live_slots_changed(cache, poisoned(2, 20, cache_dtype), SLOTS)
        for slot in (slot for slot in SLOTS if slot >= 0):
            value = exact.flatten(0, 1)[slot].float() / scale
            assert torch.equal(bits(cache.flatten(0, 1)[slot]), bits(value.to(cache_dtype)))


@pytest.mark.parametrize(("cache_dtype", "largest"), [(torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)])
def test_eight_bits_saturate(cache_dtype: torch.dtype, largest: float) -> None:
    k = torch.tensor([[[1e9, -1e9, largest, 0.0]]])
    caches = [poisoned(1, 4, cache_dtype) for _ in range(2)]
    store_kv(k, k, caches[0], caches[1], torch.tensor([0]))
    assert caches[0].float()[0, 0, 0].tolist() == [largest, -largest, largest, 0.0]


def test_nothing_to_store() -> None:
    caches = [poisoned(2, 8, torch.float32) for _ in range(2)]
    none = torch.empty(0, 2, 8)
    slots = torch.empty(0, dtype=torch.int64)
    store_kv(none, none, caches[0], caches[1], slots)
    assert norm_rotary_store(none, none, none, slots, torch.randn(4, 8), caches[0], caches[1], slots).shape == (0, 2, 8)
    only_live_slots_changed(caches[0], poisoned(2, 8, torch.float32), [])


def test_a_cache_that_is_half_of_a_wider_tensor() -> None:
    """Keys and values side by side in one allocation: slots are further apart than they are wide."""
    both = torch.full((NUM_BLOCKS, BLOCK_SIZE, 2, 3, 8), torch.nan)
    k, v = torch.randn(5, 3, 8), torch.randn(5, 3, 8)
    store_kv(k, v, both[:, :, 0], both[:, :, 1], torch.tensor(SLOTS))
    assert torch.equal(both.flatten(0, 1)[17], torch.stack((k[0], v[0])))
    assert int(both.isnan().flatten(0, 1).flatten(1).all(1).sum()) == NUM_BLOCKS * BLOCK_SIZE - 3


@triton.jit
def _offset_of(slots, out, slot_stride):
    tl.store(out, slot_offset(tl.load(slots), slot_stride))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_in_big_pools_are_64_bits_wide(dtype: torch.dtype) -> None:
    slot, out = torch.tensor([4_000_000], dtype=dtype), torch.zeros(1, dtype=torch.int64)
    _offset_of[(1,)](slot, out, 3 * 256)
    assert out.item() == 4_000_000 * 3 * 256 > 2**31


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    k, slots = torch.randn(2, 3, 8), torch.zeros(2, dtype=torch.int64)
    cache = torch.zeros(4, 2, 3, 8)
    with pytest.raises(ValueError, match=r"store_kv: k and v must be \[T, K, D\]"):
        store_kv(k, k[:, :2], cache, cache, slots)
    with pytest.raises(ValueError, match=r"caches must be \[blocks, block size, 3, 8\] of one dtype, got \[4, 2, 8, 3\]"):
        store_kv(k, k, cache.transpose(2, 3), cache.transpose(2, 3), slots)
    with pytest.raises(ValueError, match="a block must begin where the one before it ends"):
        store_kv(k, k, cache[:, :1], cache[:, :1], slots)
    with pytest.raises(ValueError, match=r"slots must be int64 \[2\], got torch.int32"):
        store_kv(k, k, cache, cache, slots.int())
    with pytest.raises(ValueError, match=r"k_scale=2.0 for a cache of torch.float32, which stores values as they are"):
        store_kv(k, k, cache, cache, slots, k_scale=2.0)
    with pytest.raises(ValueError, match=r"a cache of torch.int8"):
        store_kv(k, k, cache.to(torch.int8), cache.to(torch.int8), slots)
    with pytest.raises(ValueError, match="both q_weight and k_weight, or neither"):
        norm_rotary_store(k, k, k, slots, torch.randn(4, 8), cache, cache, slots, torch.ones(8))
    with pytest.raises(ValueError, match=r"weights must be \[8\], got \[8\] and \[7\]"):
        norm_rotary_store(k, k, k, slots, torch.randn(4, 8), cache, cache, slots, torch.ones(8), torch.ones(7))
