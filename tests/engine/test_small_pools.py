"""Pools that are too small: what can never fit is refused, what outgrows them ends, nobody is lost, nothing leaks.

The comments name the reported case each test grew from: A01 to A06, D01.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.errors import ContextWindowExceededError
from minivllm_plugin.testing import BatchRecord, HashedTokens, LedgerRunner, check_pool, drive

EOS = 0
BLOCK_SIZES = [1, 2, 3, 4, 8, 16]

MakeSequence = Callable[..., Sequence]
RunAll = Callable[..., list[BatchRecord]]


def expected(seq: Sequence) -> list[int]:
    """What the request gets when nothing else exists: no scheduler, no pool."""
    return HashedTokens(1000).continue_prompt(seq.prompt_token_ids, seq.num_completion_tokens)


# --- pools that are too small ---------------------------------------------------------------------------------------


def test_a_sequence_alone_in_the_pool_ends_with_length_when_it_outgrows_it(
    sequence: MakeSequence, run_all: RunAll, mode: Any
) -> None:  # A01
    scheduler = Scheduler(2, 16, 2, 4, EOS, **mode)
    seq = sequence(8, max_tokens=4)
    run_all(scheduler, [seq], 60)
    assert (seq.finish_reason, seq.num_completion_tokens) == ("length", 1)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("num_blocks", [1, 2, 3])
def test_everybody_ends_when_all_outgrow_the_pool(
    sequence: MakeSequence, run_all: RunAll, mode: Any, block_size: int, num_blocks: int
) -> None:  # A01
    capacity = num_blocks * block_size
    lengths = [min(capacity, length) for length in (5, 3, 1)]
    seqs = [sequence(length, 100 * number + 1, max_tokens=None) for number, length in enumerate(lengths)]
    run_all(Scheduler(4, 64, num_blocks, block_size, EOS, **mode), seqs, 60 + 4 * capacity)
    for seq, length in zip(seqs, lengths, strict=True):
        # the last token needs no slot: nothing is computed from it
        assert (seq.finish_reason, seq.num_completion_tokens) == ("length", capacity - length + 1)
        assert seq.completion_token_ids == expected(seq)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_prompt_that_can_never_fit_is_refused_and_blocks_nobody(
    sequence: MakeSequence, run_all: RunAll, mode: Any, block_size: int
) -> None:  # A02
    scheduler = Scheduler(2, 64, 2, block_size, EOS, **mode)
    too_long = sequence(2 * block_size + 1, 50)
    with pytest.raises(ContextWindowExceededError, match=rf"needs 3 KV blocks of {block_size} tokens, the pool has 2"):
        scheduler.add_sequence(too_long)
    assert scheduler.is_finished()
    assert (too_long.request_id, too_long.block_size) == (None, None)
    exact, short = sequence(2 * block_size, 100, max_tokens=1), sequence(1, 10, max_tokens=1)
    run_all(scheduler, [exact, short])
    assert [exact.finish_reason, short.finish_reason] == ["length", "length"]


def test_a_prompt_longer_than_the_budget_is_refused_without_chunks_and_cut_with_them(
    sequence: MakeSequence, run_all: RunAll
) -> None:  # D01
    classic = Scheduler(4, 4, 10, 4, EOS)
    with pytest.raises(ContextWindowExceededError, match="has 8 tokens and one step may compute 4"):
        classic.add_sequence(sequence(8))
    run_all(classic, [sequence(3, max_tokens=1)])

    mixed = Scheduler(4, 4, 10, 4, EOS, enable_chunked_prefill=True)
    long, short = sequence(8, request_id="long", max_tokens=1), sequence(3, 20, request_id="short", max_tokens=1)
    batches = run_all(mixed, [long, short])
    assert [[(row.request_id, row.num_scheduled) for row in batch.rows] for batch in batches] == [
        [("long", 4)],
        [("long", 4)],
        [("short", 3)],
    ]


def test_without_chunks_a_sequence_that_outgrew_the_budget_is_still_resumed(sequence: MakeSequence) -> None:
    scheduler = Scheduler(2, 8, 8, 4, EOS, enable_prefix_caching=False)
    seq = sequence(6, max_tokens=20)
    scheduler.add_sequence(seq)
    runner = LedgerRunner.for_scheduler(scheduler)
    while not seq.is_finished:
        batch, is_prefill = scheduler.schedule()
        check_pool(scheduler)
        scheduler.postprocess(batch, runner.run(batch, is_prefill))
        if seq.num_tokens == 20 and not seq.num_preemptions:
            scheduler.preempt(seq)
            runner.batches.clear()
    assert [batch.num_tokens for batch in runner.batches] == [8, 8, 4, 1, 1, 1, 1, 1]
    assert [batch.is_prefill for batch in runner.batches] == [True] * 3 + [False] * 5
    assert seq.completion_token_ids == expected(seq)


# --- nobody is lost, nothing leaks ----------------------------------------------------------------------------------


def test_nobody_is_lost_when_the_sequence_limit_is_hit(sequence: MakeSequence, mode: Any) -> None:  # A03a
    scheduler = Scheduler(2, 64, 100, 4, EOS, **mode)
    seqs = [sequence(3, 10 * number + 1, max_tokens=9) for number in range(5)]
    for seq in seqs:
        scheduler.add_sequence(seq)
    for _ in range(4):
        batch, _ = scheduler.schedule()
        scheduler.postprocess(batch, [7] * len(batch))
        assert len(scheduler.running) <= 2  # A11a
        assert {seq.request_id for seq in (*scheduler.waiting, *scheduler.running)} == {seq.request_id for seq in seqs}


def test_the_one_who_needs_a_block_gets_it_and_the_victim_waits(sequence: MakeSequence, mode: Any) -> None:  # A03b
    scheduler = Scheduler(4, 64, 2, 4, EOS, **mode)
    first, second = sequence(4, request_id="A"), sequence(4, 20, request_id="B")
    runner = LedgerRunner.for_scheduler(scheduler)
    for seq in (first, second):
        scheduler.add_sequence(seq)
    batch, is_prefill = scheduler.schedule()
    scheduler.postprocess(batch, runner.run(batch, is_prefill))
    batch, is_prefill = scheduler.schedule()
    assert (batch, is_prefill) == ([first], False)
    assert (list(scheduler.running), list(scheduler.waiting)) == ([first], [second])


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_fifty_requests_one_after_another_leave_the_pool_whole(
    sequence: MakeSequence, run_all: RunAll, mode: Any, num_blocks: int
) -> None:  # A04a
    scheduler = Scheduler(2, 64, num_blocks, 4, EOS, **mode)
    for number in range(50):
        seq = sequence(3, number + 1, max_tokens=1)
        run_all(scheduler, [seq])
        assert seq.finish_reason == "length"


def test_an_empty_batch_after_everybody_was_aborted(sequence: MakeSequence, mode: Any) -> None:  # A06a
    scheduler = Scheduler(4, 64, 16, 4, EOS, **mode)
    for request_id in "ab":
        scheduler.add_sequence(sequence(3, request_id=request_id))
    batch, _ = scheduler.schedule()
    scheduler.postprocess(batch, [7, 7])
    for request_id in "ab":
        scheduler.abort(request_id)
    assert scheduler.schedule() == ([], False)
    assert scheduler.is_finished()
    check_pool(scheduler)


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_is_never_empty_while_there_is_work(
    sequence: MakeSequence, seed: int
) -> None:  # A06b; drive() looks, five pools a seed
    rng = random.Random(seed)
    for _ in range(5):
        block_size = rng.choice(BLOCK_SIZES)
        num_blocks = rng.randint(1, 6)
        budget = rng.choice([1, 2, 5, 16, 64])
        chunked = rng.random() < 0.5
        scheduler = Scheduler(
            rng.randint(1, 4), budget, num_blocks, block_size, EOS,
            enable_chunked_prefill=chunked, enable_prefix_caching=rng.random() < 0.7, policy=rng.choice(["fcfs", "priority"]),
        )  # fmt: skip
        longest = num_blocks * block_size if chunked else min(num_blocks * block_size, budget)
        seqs = [sequence(rng.randint(1, min(longest, 12)), rng.randint(1, 3), max_tokens=rng.randint(1, 9)) for _ in range(6)]
        runner = LedgerRunner.for_scheduler(scheduler)
        drive(scheduler, runner, 2000, arrivals={rng.randint(0, 12) * 6 + number: [seq] for number, seq in enumerate(seqs)})
        assert all(seq.completion_token_ids == expected(seq) for seq in seqs)
