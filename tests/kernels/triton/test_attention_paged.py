"""The attention kernels, interpreted, against a float64 loop and the reference: odd shapes, poisoned caches (J01, J03)."""

import math
from dataclasses import replace

import pytest
import torch
from paged_batches import BATCHES, attention_loop, paged_batch, poisoned
from torch import Tensor

import minivllm_kernels as kernels
from minivllm_kernels import AttentionMetadata, reference
from minivllm_kernels.dispatch import choose
from minivllm_kernels.metadata import AttentionGeometry
from minivllm_kernels.triton.attention import attention
from minivllm_kernels.triton.attention_inputs import unsupported

SHAPES = [(9, 3, 64), (4, 1, 80), (6, 2, 96), (4, 1, 256), (16, 8, 128), (2, 2, 16), (5, 5, 6)]
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def close(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.double(), expected.double(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("batch", ["one token", "decode, many lengths", "mixed"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention(shape: tuple[int, int, int], batch: str) -> None:
    q, k_cache, v_cache, metadata = paged_batch(shape, *BATCHES[batch], block_size=8, dtype=torch.float32)
    close(attention(q, k_cache, v_cache, metadata, 0.3), attention_loop(q, k_cache, v_cache, metadata, 0.3))


@pytest.mark.parametrize("block_size", [1, 3, 8, 16, 32, 256])
def test_attention_with_any_block_size(block_size: int) -> None:
    """Lengths around the borders of blocks and of tiles."""
    lengths = ([1, 40, 1, 3, 1], [32, 65, 33, 16, 64])
    q, k_cache, v_cache, metadata = paged_batch((6, 2, 24), *lengths, block_size=block_size, dtype=torch.float32)
    got = attention(q, k_cache, v_cache, metadata, 0.2)
    close(got, attention_loop(q, k_cache, v_cache, metadata, 0.2))
    close(got, reference.attention(q, k_cache, v_cache, replace(metadata, scratch={}), 0.2))


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e5m2),
    ],
)
def test_attention_in_other_types(dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    batch = ([1, 6, 1, 33], [70, 40, 300, 33])
    q, k_cache, v_cache, metadata = paged_batch((4, 2, 40), *batch, block_size=16, dtype=dtype, cache_dtype=cache_dtype)
    got = attention(q, k_cache, v_cache, metadata, 0.15)
    assert got.dtype == dtype
    close(got, attention_loop(q, k_cache, v_cache, metadata, 0.15))


@pytest.mark.parametrize("batch", ["decode, many lengths", "chunk after context"])
def test_scales_of_an_8_bit_cache(batch: str) -> None:
    q, k_cache, v_cache, metadata = paged_batch((4, 2, 16), *BATCHES[batch], 8, torch.float32, torch.float8_e4m3fn)
    got = attention(q, k_cache, v_cache, metadata, 0.25, k_scale=0.5, v_scale=3.0)
    close(got, attention_loop(q, k_cache.float() * 0.5, v_cache.float() * 3.0, metadata, 0.25))


def test_queries_too_large_for_float16_over_an_8_bit_cache_are_no_infinities() -> None:
    q, k_cache, v_cache, metadata = paged_batch((2, 1, 16), *BATCHES["mixed"], 8, torch.bfloat16, torch.float8_e5m2)
    assert attention(q * 1e5, k_cache, v_cache, metadata, 1e-6).isfinite().all()


@pytest.mark.parametrize("group", [1, 7, 40])
def test_groups_of_any_size(group: int) -> None:
    """40 heads of one KV head are more than one program takes."""
    q, k_cache, v_cache, metadata = paged_batch((2 * group, 2, 8), [1, 5], [30, 12], block_size=8, dtype=torch.float32)
    close(attention(q, k_cache, v_cache, metadata, 0.4), attention_loop(q, k_cache, v_cache, metadata, 0.4))


def test_queries_that_are_a_slice_of_the_projection_and_caches_side_by_side() -> None:
    q, k_cache, v_cache, metadata = paged_batch((4, 2, 16), *BATCHES["mixed"], block_size=8, dtype=torch.float32)
    merged = torch.full((q.shape[0], 11, 20), torch.nan)
    merged[:, 3:7, :16] = q
    both = torch.stack((k_cache, v_cache), dim=2)
    got = attention(merged[:, 3:7, :16], both[:, :, 0], both[:, :, 1], metadata, 0.25)
    assert got.is_contiguous()
    assert torch.equal(got, attention(q, k_cache, v_cache, replace(metadata, scratch={}), 0.25))


def test_padding_of_the_block_tables_is_never_followed() -> None:
    q, k_cache, v_cache, metadata = paged_batch((2, 1, 16), *BATCHES["mixed"], block_size=8, dtype=torch.float32)
    expected = attention_loop(q, k_cache, v_cache, metadata, 0.3)
    tables = metadata.block_tables.clone()
    for b, length in enumerate(metadata.seq_lens or ()):
        tables[b, -(-length // 8) :] = 2**30  # an access there would end the process
    close(attention(q, k_cache, v_cache, replace(metadata, block_tables=tables), 0.3), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_blocks_beyond_two_to_the_31_elements(dtype: torch.dtype) -> None:
    """Trials J03: block 250,000 of 16 slots of 3 heads of 256 starts at element 3,072,000,000. Untouched pages take no memory."""
    try:
        cache = torch.empty(250_001, 16, 3, 256, dtype=torch.float16)
    except RuntimeError:
        pytest.skip("no 6 GB of address space")
    values = torch.randn(3, 3, 256).half()
    cache[250_000, :3] = values
    decode = AttentionMetadata.build([1], [1], [[250_000]], 16)
    decode = replace(decode, block_tables=decode.block_tables.to(dtype))
    q = torch.randn(3, 9, 256).half()
    close(attention(q[:1], cache, cache, decode, 0.1), values[:1].repeat_interleave(3, dim=1))
    small = torch.zeros(2, 16, 3, 256, dtype=torch.float16)
    small[1, :3] = values
    prefill, same = (AttentionMetadata.build([3], [3], [[block]], 16) for block in (250_000, 1))
    assert torch.equal(attention(q, cache, cache, prefill, 0.1), attention(q, small, small, same, 0.1))


def test_nothing_to_do() -> None:
    k_cache, v_cache = poisoned(2, 8, 1, 16)
    metadata = AttentionMetadata.build([], [], [], 8)
    assert attention(torch.empty(0, 2, 16), k_cache, v_cache, metadata, 0.25).shape == (0, 2, 16)


@pytest.mark.usefixtures("forced_interpreter")
def test_the_public_op_finds_these_kernels() -> None:
    assert choose("attention", "cpu").function is attention
    q, k_cache, v_cache, metadata = paged_batch((4, 2, 16), *BATCHES["mixed"], block_size=8, dtype=torch.float32)
    close(kernels.attention(q, k_cache, v_cache, metadata, 0.25), attention_loop(q, k_cache, v_cache, metadata, 0.25))


def test_what_cannot_be_attended_to_is_refused_by_name() -> None:
    q, k_cache, v_cache, metadata = paged_batch((4, 2, 16), *BATCHES["mixed"], block_size=8, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"caches \[blocks, 4, K, D\], the block size being that of the metadata"):
        attention(q, k_cache, v_cache, replace(metadata, block_size=4), 0.25)
    with pytest.raises(ValueError, match="both caches must have one shape, dtype and strides"):
        attention(q, k_cache, v_cache.half(), metadata, 0.25)
    with pytest.raises(ValueError, match="3 query heads, which 2 KV heads cannot share evenly"):
        attention(q[:, :3], k_cache, v_cache, metadata, 0.25)
    with pytest.raises(ValueError, match="head size 300, more than 256"):
        attention(torch.zeros(1, 2, 300), *poisoned(2, 8, 1, 300), metadata, 0.25)
    with pytest.raises(ValueError, match=r"a cache of torch\.int8"):
        attention(q, k_cache.nan_to_num().to(torch.int8), v_cache.nan_to_num().to(torch.int8), metadata, 0.25)
    with pytest.raises(ValueError, match=r"scale=-1.0; it must be positive and finite"):
        attention(q, k_cache, v_cache, metadata, -1.0)
    with pytest.raises(ValueError, match=r"k_scale=2.0, v_scale=1.0 for a cache of torch.float32, which has none"):
        attention(q, k_cache, v_cache, metadata, 0.25, k_scale=2.0)
    with pytest.raises(ValueError, match=r"v_scale=inf; the scale of a cache must be positive and finite"):
        attention(q, k_cache, v_cache, metadata, 0.25, v_scale=math.inf)


def test_what_a_model_needs_is_checked_before_it_runs() -> None:
    able = AttentionGeometry(9, 3, 64, 16, torch.bfloat16, torch.float8_e4m3fn)
    assert unsupported(able) is None
    assert unsupported(replace(able, head_dim=512)) == "head size 512, more than 256"
    assert unsupported(replace(able, num_heads=8)) == "8 query heads, which 3 KV heads cannot share evenly"
    assert unsupported(replace(able, dtype=torch.float64)) == "queries of torch.float64, not float32, bfloat16 or float16"
    assert "a cache of torch.int8" in str(unsupported(replace(able, cache_dtype=torch.int8)))
