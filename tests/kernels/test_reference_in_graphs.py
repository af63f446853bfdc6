"""The plain-torch ops where a captured graph needs them: without a look at any value on the host, and past padded rows.

Also caches of 8-bit floats: what is stored is the nearest value that they hold, and what is too large is the largest.
"""

import random

import pytest
import torch
from recorded_graphs import CaptureRefusedError, RecordingGraphApi
from torch import Tensor

from minivllm_kernels import AttentionMetadata, reference

BLOCK_SIZE, HEADS, KV_HEADS, SIZE = 4, 6, 2, 8
FLOATS_OF_8_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


def caches(num_blocks: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (num_blocks, BLOCK_SIZE, KV_HEADS, SIZE)
    return tuple(torch.randn(shape, generator=generator).to(dtype) for _ in range(2))  # type: ignore[return-value]  # two


def same(first: Tensor, second: Tensor) -> bool:
    return torch.equal(first.view(torch.uint8), second.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, *FLOATS_OF_8_BITS])
@pytest.mark.parametrize("slots", [[5, -1, -1], [-1, 0, -1], [-1, -1, 7], [0, 5, 3], [-1, -1, -1], []], ids=str)
def test_negative_slots_are_nowhere(slots: list[int], dtype: torch.dtype) -> None:  # J01
    k = torch.randn(len(slots), KV_HEADS, SIZE)
    v = torch.randn(len(slots), KV_HEADS, SIZE)
    k_cache, v_cache = caches(3, dtype)
    expected = [k_cache.clone(), v_cache.clone()]
    for row, slot in enumerate(slots):
        if slot >= 0:
            for cache, new in zip(expected, (k, v), strict=True):
                cache.view(torch.uint8).view(-1, *cache.shape[2:-1], SIZE * cache.element_size())[slot] = (
                    new[row].to(dtype).view(torch.uint8)
                )
    reference.store_kv(k, v, k_cache, v_cache, torch.tensor(slots, dtype=torch.int64))
    assert same(k_cache, expected[0])
    assert same(v_cache, expected[1])


@pytest.mark.parametrize("dtype", FLOATS_OF_8_BITS)
def test_what_8_bits_cannot_hold_is_the_most_that_they_can(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    k = torch.tensor([1e9, -1e9, most, 0.3, -0.0, 1.0, most * 1.01, 2.0**-20]).view(1, 1, 8)
    k_cache, v_cache = (torch.zeros(1, 1, 1, 8).to(dtype) for _ in range(2))
    reference.store_kv(k, -k, k_cache, v_cache, torch.tensor([0]))
    stored = k_cache.float().flatten().tolist()
    assert stored[:3] == [most, -most, most]
    assert stored[6] == most
    assert stored[5] == 1.0
    assert abs(stored[3] - 0.3) <= 0.3 * 2.0 ** -(4 if dtype == torch.float8_e4m3fn else 3)
    assert v_cache.float().flatten().tolist()[:3] == [-most, most, -most]


def decode_batch(lengths: list[int], width: int, seed: int = 0) -> tuple[AttentionMetadata, AttentionMetadata]:
    """The same batch as the host knows it, and as a graph does: padded by two rows, and tables wider than any length."""
    rng = random.Random(seed)
    blocks = rng.sample(range(len(lengths) * width), len(lengths) * width)
    tables = [[blocks.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]
    host = AttentionMetadata.build([1] * len(lengths), lengths, tables, BLOCK_SIZE)
    padded = torch.zeros(len(lengths) + 2, width, dtype=torch.int32)
    for row, table in zip(padded, tables, strict=False):
        row[: len(table)] = torch.tensor(table)
    device = AttentionMetadata(
        query_lens=(1,) * len(padded),
        seq_lens=None,
        block_tables=padded,
        slot_mapping=torch.tensor([*host.slot_mapping.tolist(), -1, -1]),
        block_size=BLOCK_SIZE,
        query_starts=torch.arange(len(padded) + 1, dtype=torch.int32),
        lengths=torch.tensor([*lengths, 0, 0], dtype=torch.int32),
        max_seq_len=width * BLOCK_SIZE,
    )
    return host, device


@pytest.mark.parametrize("limit", [reference.GATHER_LIMIT_BYTES, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn])
def test_lengths_on_the_device_give_what_lengths_on_the_host_give(
    dtype: torch.dtype, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "GATHER_LIMIT_BYTES", limit)
    lengths = [1, 4, 5, 19, 24, 13]
    host, device = decode_batch(lengths, 6)
    k_cache, v_cache = caches(len(lengths) * 6, dtype)
    unwritten = torch.ones(len(lengths) * 6 * BLOCK_SIZE, dtype=torch.bool)
    for table, length in zip(host.block_tables.tolist(), lengths, strict=True):
        for position in range(length):
            unwritten[table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE] = False
    for cache in (k_cache, v_cache):
        cache.view(torch.uint8).view(unwritten.shape[0], -1)[unwritten] = 0xFF  # NaN in all of these types
    q = torch.randn(len(lengths) + 2, HEADS, SIZE)
    expected = reference.attention(q[: len(lengths)], k_cache, v_cache, host, 0.3)
    result = reference.attention(q, k_cache, v_cache, device, 0.3)
    assert torch.isfinite(expected).all()
    torch.testing.assert_close(result[: len(lengths)], expected, rtol=1e-6, atol=1e-6)


def test_a_recorded_step_follows_its_buffers_and_looks_at_nothing_on_the_host() -> None:
    """Store and attend once recorded, then replayed for another batch in the same buffers."""
    lengths = [3, 9, 17]
    host, device = decode_batch(lengths, 5)
    k_cache, v_cache = caches(15)
    q, k, v = (torch.randn(5, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    out = torch.zeros_like(q)
    api = RecordingGraphApi()
    with torch.inference_mode():
        with api.capture(api.pool()) as graph:
            reference.store_kv(k, v, k_cache, v_cache, device.slot_mapping)
            out.copy_(reference.attention(q, k_cache, v_cache, device, 0.3))
        assert not out.any()  # recorded, not run
        for _ in range(2):
            graph.replay()
            wanted_k, wanted_v = k_cache.clone(), v_cache.clone()
            reference.store_kv(k[:3], v[:3], wanted_k, wanted_v, host.slot_mapping)
            assert torch.equal(k_cache, wanted_k)
            expected = reference.attention(q[:3], k_cache, v_cache, host, 0.3)
            torch.testing.assert_close(out[:3], expected, rtol=1e-6, atol=1e-6)
            host, other = decode_batch([20, 1, 6], 5, seed=3)
            for target, source in ((q, torch.randn_like(q)), (k, torch.randn_like(k)), (v, torch.randn_like(v))):
                target.copy_(source)
            for name in ("block_tables", "slot_mapping", "lengths"):
                getattr(device, name).copy_(getattr(other, name))


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: bool((x > 0).any()),
        lambda x: float(x[0]),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.masked_select(x > 0),
        lambda x: x + torch.tensor([1.0, 2.0, 3.0]),
        lambda x: x.unique(),
    ],
)
def test_the_recorder_refuses_what_a_capture_refuses(work: object) -> None:
    api = RecordingGraphApi()
    x = torch.tensor([1.0, -2.0, 3.0])
    with pytest.raises(CaptureRefusedError), torch.inference_mode(), api.capture(api.pool()):
        work(x)  # type: ignore[operator]  # one of the above
    assert api.graphs == []
