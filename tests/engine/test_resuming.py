"""Preemption by recompute: what was generated is kept, nothing is computed twice that is still there, the turn is kept.

The comments name the reported case each test grew from: A08, A09, A12.
"""

from collections.abc import Callable
from typing import Any

import pytest

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence, SequenceStatus
from minivllm_plugin.testing import BatchRecord, HashedTokens, LedgerRunner, assert_invariants

EOS = 0
BLOCK_SIZES = [1, 2, 3, 4, 8, 16]

MakeSequence = Callable[..., Sequence]
RunAll = Callable[..., list[BatchRecord]]


def expected(seq: Sequence) -> list[int]:
    """What the request gets when nothing else exists: no scheduler, no pool."""
    return HashedTokens(1000).continue_prompt(seq.prompt_token_ids, seq.num_completion_tokens)


# --- coming back after a preemption ---------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
def test_a_resumed_sequence_counts_after_the_cache_lookup(sequence: MakeSequence, run_all: RunAll, chunked: bool) -> None:  # A08
    scheduler = Scheduler(4, 64, 5, 4, EOS, enable_chunked_prefill=chunked)
    first, second = sequence(7, 1, "first", max_tokens=4), sequence(7, 20, "second", max_tokens=4)
    batches = run_all(scheduler, [first, second])
    assert second.num_preemptions == 1
    (resumed,) = [row for batch in batches for row in batch.rows if row.request_id == "second" and row.num_computed == 8]
    assert resumed.num_scheduled == 1
    assert second.num_cached_tokens == 8
    assert second.prompt_cached_tokens == 0  # a usage report tells what the prompt had at first


@pytest.mark.parametrize("num_blocks", [4, 5, 64])
def test_a_resumed_sequence_loses_neither_tokens_nor_its_turn(sequence: MakeSequence, mode: Any, num_blocks: int) -> None:  # A09
    scheduler = Scheduler(4, 64, num_blocks, 4, EOS, **mode)
    first, second = sequence(7, 1, "first", max_tokens=4), sequence(7, 20, "second", max_tokens=4)
    newcomer = sequence(3, 40, "newcomer", max_tokens=4)
    scheduler.add_sequence(first)
    scheduler.add_sequence(second)
    runner = LedgerRunner.for_scheduler(scheduler)
    order: list[str] = []
    while not scheduler.is_finished():
        batch, is_prefill = scheduler.schedule()
        if second.status is SequenceStatus.WAITING and newcomer.request_id not in order and newcomer not in scheduler.waiting:
            scheduler.add_sequence(newcomer)
            assert list(scheduler.waiting) == [second, newcomer]
            order.append("newcomer")
        scheduler.postprocess(batch, runner.run(batch, is_prefill))
        assert_invariants(scheduler, [first, second])
        if newcomer.first_scheduled_step is not None and second.num_preemptions:
            assert second.last_scheduled_step >= newcomer.first_scheduled_step or second.is_finished
    for seq in (first, second):
        assert seq.completion_token_ids == expected(seq)
        assert seq.num_completion_tokens == 4
    assert bool(second.num_preemptions) == (num_blocks < 64)


def test_two_that_put_each_other_out_both_end(sequence: MakeSequence, run_all: RunAll) -> None:
    for block_size in BLOCK_SIZES:
        for chunked in (False, True):
            scheduler = Scheduler(2, 64, 12, block_size, EOS, enable_chunked_prefill=chunked, enable_prefix_caching=False)
            seqs = [sequence(min(8, 6 * block_size), 50 * number + 1, max_tokens=5 * block_size) for number in range(4)]
            run_all(scheduler, seqs, 400)
            assert [seq.completion_token_ids for seq in seqs] == [expected(seq) for seq in seqs]


# --- token counts ---------------------------------------------------------------------------------------------------


def test_lengths_move_with_every_token(sequence: MakeSequence, run_all: RunAll, mode: Any) -> None:  # A12a
    scheduler = Scheduler(4, 64, 16, 4, EOS, **mode)
    seq = sequence(3, max_tokens=3)
    batches = run_all(scheduler, [seq])
    assert len(batches) == 3
    assert (seq.num_completion_tokens, seq.num_tokens, len(seq)) == (3, 6, 6)
    assert seq.last_token == seq.completion_token_ids[-1] == expected(seq)[-1]


def test_nobody_gains_a_token_in_a_step_that_does_not_complete_it(sequence: MakeSequence) -> None:  # A12b
    scheduler = Scheduler(4, 6, 64, 4, EOS, enable_chunked_prefill=True)
    long, short = sequence(10, 1, "long"), sequence(3, 30, "short")
    scheduler.add_sequence(long)
    scheduler.add_sequence(short)
    runner = LedgerRunner.for_scheduler(scheduler)
    counts = []
    for _ in range(3):
        batch, is_prefill = scheduler.schedule()
        before = {
            seq.request_id: (seq.num_completion_tokens, seq.num_uncomputed_tokens - seq.num_scheduled_tokens) for seq in batch
        }
        scheduler.postprocess(batch, runner.run(batch, is_prefill))
        for seq in batch:
            completed, left = before[seq.request_id]
            assert seq.num_completion_tokens == completed + (left == 0)
        counts.append((long.num_completion_tokens, short.num_completion_tokens))
    assert counts == [(0, 0), (1, 0), (2, 1)]
