"""A row is the same to the bit alone and in company, chunked and whole, warm and cold, in a captured graph and outside."""

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from paged_batches import attention_loop, paged_batch

from minivllm_kernels import AttentionMetadata
from minivllm_kernels.triton import attention as module
from minivllm_kernels.triton.attention import attention
from minivllm_kernels.triton.attention_configurations import LEAST_SPLIT, max_splits
from minivllm_kernels.triton.attention_prefill import tile_table

SHAPE = (6, 2, 20)
SCALE = 0.22
LENGTHS = [1, LEAST_SPLIT, LEAST_SPLIT + 1, 2 * LEAST_SPLIT + 5]  # around the borders of splits


def rows_of(metadata: AttentionMetadata, b: int, new: int, total: int) -> AttentionMetadata:
    """Sequence b alone, with so many of its tokens already computed."""
    return AttentionMetadata.build([new], [total], [metadata.block_tables[b].tolist()], metadata.block_size)


def as_captured(metadata: AttentionMetadata, num_padding: int, bound: int) -> AttentionMetadata:
    """As a captured graph has it: lengths known on the device only, padding at the end, wide tables, a bound of the lengths."""
    batch = len(metadata.query_lens)
    tables = torch.full((batch + num_padding, bound // metadata.block_size), 2**30, dtype=torch.int32)
    for b, length in enumerate(metadata.seq_lens or ()):
        used = -(-length // metadata.block_size)
        tables[b, :used] = metadata.block_tables[b, :used]
    return replace(
        metadata,
        query_lens=(1,) * (batch + num_padding),
        seq_lens=None,
        block_tables=tables,
        slot_mapping=torch.cat((metadata.slot_mapping, torch.full((num_padding,), -1))),
        query_starts=torch.arange(batch + num_padding + 1, dtype=torch.int32),
        lengths=torch.cat((metadata.lengths, torch.zeros(num_padding, dtype=torch.int32))),
        max_seq_len=bound,
        scratch={},
    )


def test_decode_alone_in_company_and_in_a_captured_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k_cache, v_cache, metadata = paged_batch(SHAPE, [1] * len(LENGTHS), LENGTHS, 16, torch.float32)
    together = attention(q, k_cache, v_cache, metadata, SCALE)
    expected = attention_loop(q, k_cache, v_cache, metadata, SCALE)
    torch.testing.assert_close(together.double(), expected, atol=1e-5, rtol=1e-5)
    for b, length in enumerate(LENGTHS):
        alone = attention(q[b : b + 1], k_cache, v_cache, rows_of(metadata, b, 1, length), SCALE)
        assert torch.equal(alone[0], together[b]), length

    padded = torch.cat((q, torch.full((2, *q.shape[1:]), torch.nan)))
    captured = as_captured(metadata, 2, 20 * LEAST_SPLIT)
    replayed = attention(padded, k_cache, v_cache, captured, SCALE)
    assert torch.equal(replayed[:-2], together)
    assert torch.equal(replayed[-2:], torch.zeros_like(padded[-2:]))

    monkeypatch.setattr(module, "SMS_OF_A_CPU", 1000)  # a program for each split
    module._num_sms.cache_clear()
    wide = attention(q, k_cache, v_cache, replace(metadata, scratch={}), SCALE)
    module._num_sms.cache_clear()
    assert torch.equal(wide, together)


def test_more_tokens_than_the_usual_splits_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few splits allowed they grow, in whole tiles."""
    monkeypatch.setattr("minivllm_kernels.triton.attention_decode.max_splits", lambda programs: 4)
    q, k_cache, v_cache, metadata = paged_batch((2, 1, 16), [1, 1], [4 * LEAST_SPLIT + 1, 1200], 32, torch.float32)
    got = attention(q, k_cache, v_cache, metadata, SCALE)
    torch.testing.assert_close(got.double(), attention_loop(q, k_cache, v_cache, metadata, SCALE), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("chunks", [[150], [37, 113], [64, 64, 22], [2, 146, 2]])
def test_prefill_whole_in_chunks_and_after_a_warm_prefix(chunks: Sequence[int]) -> None:
    total, other = 150, 90
    q, k_cache, v_cache, metadata = paged_batch(SHAPE, [total, other], [total, other], 8, torch.bfloat16)
    whole = attention(q, k_cache, v_cache, metadata, SCALE)
    done = 0
    for new in chunks:
        part = rows_of(metadata, 0, new, done + new)
        got = attention(q[done : done + new], k_cache, v_cache, part, SCALE)
        assert torch.equal(got, whole[done : done + new]), (done, new)
        done += new
    expected = attention_loop(q, k_cache, v_cache, metadata, SCALE)
    torch.testing.assert_close(whole.double(), expected, atol=2e-2, rtol=2e-2)


def test_a_mixed_batch_gives_each_row_what_it_gets_alone() -> None:
    news, totals = [1, 40, 1, 9], [300, 40, 7, 100]
    q, k_cache, v_cache, metadata = paged_batch(SHAPE, news, totals, 16, torch.float32)
    together, start = attention(q, k_cache, v_cache, metadata, SCALE), 0
    for b, (new, total) in enumerate(zip(news, totals, strict=True)):
        alone = attention(q[start : start + new], k_cache, v_cache, rows_of(metadata, b, new, total), SCALE)
        assert torch.equal(alone, together[start : start + new])
        start += new


def test_layers_of_one_pass_share_what_is_derived_of_it() -> None:
    q, k_cache, v_cache, metadata = paged_batch(SHAPE, [1, 20], [300, 30], 16, torch.float32)
    first = attention(q, k_cache, v_cache, metadata, SCALE)
    plan = metadata.scratch[module.SCRATCH]
    kept = [*plan.tables.values(), *[split.sums for split in plan.splits.values()], plan.decode_rows]
    assert len(kept) == 3
    second = attention(q, v_cache, k_cache, metadata, SCALE)
    assert torch.equal(attention(q, k_cache, v_cache, metadata, SCALE), first)
    assert not torch.equal(second, first)
    again = metadata.scratch[module.SCRATCH]
    assert again is plan
    assert all(
        a is b
        for a, b in zip(
            kept, [*plan.tables.values(), *[split.sums for split in plan.splits.values()], plan.decode_rows], strict=True
        )
    )


def test_programs_cover_every_new_token_once_and_the_longest_come_first() -> None:
    draw = random.Random(0)
    news = [draw.choice([1, 2, 30, 31, 32, 33, 100]) for _ in range(20)]
    totals = [new + draw.randrange(200) for new in news]
    table = tile_table(news, totals, 32)
    covered = sorted((b, token) for b, first in table for token in range(first, min(first + 32, news[b])))
    assert covered == [(b, token) for b, new in enumerate(news) if new > 1 for token in range(new)]
    keys = [totals[b] - news[b] + first for b, first in table]
    assert keys == sorted(keys, reverse=True)


def test_few_kv_heads_split_a_context_more_often() -> None:
    assert [max_splits(programs) for programs in (1, 2, 3, 4, 8, 40)] == [64, 64, 64, 32, 16, 16]
