"""Callers that make mistakes: the scheduler refuses, or carries on as if nothing had happened; its state stays whole."""

from collections.abc import Callable
from typing import Any

import pytest

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.testing import BatchRecord, HashedTokens, LedgerRunner, check_pool, drive

EOS = 0
BLOCK_SIZES = [1, 2, 3, 4, 8, 16]

MakeSequence = Callable[..., Sequence]
RunAll = Callable[..., list[BatchRecord]]


def expected(seq: Sequence) -> list[int]:
    """What the request gets when nothing else exists: no scheduler, no pool."""
    return HashedTokens(1000).continue_prompt(seq.prompt_token_ids, seq.num_completion_tokens)


def test_schedule_twice_without_postprocess_computes_the_same_again(sequence: MakeSequence, mode: Any) -> None:
    scheduler = Scheduler(4, 64, 8, 2, EOS, **mode)
    seqs = [sequence(length, 20 * length, max_tokens=6) for length in (1, 2, 5)]
    for seq in seqs:
        scheduler.add_sequence(seq)
    runner = LedgerRunner.for_scheduler(scheduler)
    for _ in range(200):
        if scheduler.is_finished():
            break
        scheduler.schedule()
        batch, is_prefill = scheduler.schedule()
        check_pool(scheduler)
        scheduler.postprocess(batch, runner.run(batch, is_prefill))
        check_pool(scheduler)
    assert [seq.completion_token_ids for seq in seqs] == [expected(seq) for seq in seqs]


def test_a_batch_that_was_replaced_by_another_schedule_is_void(sequence: MakeSequence) -> None:
    scheduler = Scheduler(4, 4, 16, 4, EOS)
    a, b, c, d = (sequence(1, 10 * number + 1) for number in range(4))
    for seq in (a, b, c, d):
        scheduler.add_sequence(seq)
    batch, _ = scheduler.schedule()
    scheduler.postprocess(batch, [7] * 4)
    scheduler.max_num_batched_tokens = 2
    first, _ = scheduler.schedule()
    second, _ = scheduler.schedule()
    assert (first, second) == ([a, b], [c, d])
    scheduler.postprocess(first, [8, 8])
    assert [seq.num_completion_tokens for seq in (a, b, c, d)] == [1, 1, 1, 1]
    scheduler.postprocess(second, [9, 9])
    assert [seq.num_completion_tokens for seq in (a, b, c, d)] == [1, 1, 2, 2]
    check_pool(scheduler)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "2 sequences but 0 tokens"),
        ([1], "but 1 tokens"),
        ([1, 2, 3], "but 3 tokens"),
        ([1, -2], "-2"),
        ([2**63, 1], str(2**63)),
    ],
)
def test_postprocess_refuses_a_wrong_answer_and_changes_nothing(sequence: MakeSequence, tokens: list[int], message: str) -> None:
    scheduler = Scheduler(4, 64, 16, 4, EOS)
    seqs = [sequence(3), sequence(3, 20)]
    for seq in seqs:
        scheduler.add_sequence(seq)
    batch, is_prefill = scheduler.schedule()
    with pytest.raises(ValueError, match=message):
        scheduler.postprocess(batch, tokens)
    assert [seq.num_tokens for seq in seqs] == [3, 3]
    assert [seq.num_computed_tokens for seq in seqs] == [0, 0]
    scheduler.postprocess(batch, LedgerRunner.for_scheduler(scheduler).run(batch, is_prefill))
    assert [seq.num_tokens for seq in seqs] == [4, 4]


def test_postprocess_twice_with_the_same_batch_adds_one_token_only(sequence: MakeSequence) -> None:
    scheduler = Scheduler(4, 64, 16, 4, EOS)
    seq = sequence(3)
    scheduler.add_sequence(seq)
    batch, _ = scheduler.schedule()
    scheduler.postprocess(batch, [7])
    scheduler.postprocess(batch, [8])
    assert seq.completion_token_ids == [7]
    check_pool(scheduler)


def test_ids_are_unique_among_live_sequences_and_a_sequence_runs_once(sequence: MakeSequence, run_all: RunAll) -> None:
    scheduler = Scheduler(4, 64, 16, 4, EOS)
    seq = sequence(3, request_id="a", max_tokens=1)
    scheduler.add_sequence(seq)
    for twin in (seq, sequence(3, request_id="a")):
        with pytest.raises(InvalidRequestError, match="'a' is already in the engine"):
            scheduler.add_sequence(twin)
    drive(scheduler, LedgerRunner.for_scheduler(scheduler))
    with pytest.raises(InvalidRequestError, match="new Sequence"):
        scheduler.add_sequence(seq)
    again = sequence(3, request_id="a", max_tokens=1)
    run_all(scheduler, [again])
    assert again.completion_token_ids == seq.completion_token_ids


def test_numbered_ids_avoid_those_that_a_caller_chose(sequence: MakeSequence) -> None:
    scheduler = Scheduler(4, 64, 16, 4, EOS)
    chosen = [sequence(3, request_id="request-1"), sequence(3, request_id="request-2")]
    numbered = [sequence(3), sequence(3)]
    for seq in (*chosen, *numbered):
        scheduler.add_sequence(seq)
    check_pool(scheduler)
    assert len({seq.request_id for seq in (*chosen, *numbered)}) == 4


def test_only_a_running_sequence_can_be_preempted(sequence: MakeSequence) -> None:
    scheduler = Scheduler(4, 64, 16, 4, EOS)
    seq = sequence(3, request_id="a", max_tokens=1)
    with pytest.raises(InvalidRequestError, match="not running"):
        scheduler.preempt(seq)
    scheduler.add_sequence(seq)
    with pytest.raises(InvalidRequestError, match="'a' is not running"):
        scheduler.preempt(seq)
    drive(scheduler, LedgerRunner.for_scheduler(scheduler))
    with pytest.raises(InvalidRequestError, match="not running"):
        scheduler.preempt(seq)
    check_pool(scheduler)


def test_preempting_between_schedule_and_postprocess_drops_that_token_only(sequence: MakeSequence, mode: Any) -> None:
    scheduler = Scheduler(4, 64, 16, 4, EOS, **mode)
    seqs = [sequence(5), sequence(5, 20)]
    for seq in seqs:
        scheduler.add_sequence(seq)
    runner = LedgerRunner.for_scheduler(scheduler)
    for step in range(100):
        if scheduler.is_finished():
            break
        batch, is_prefill = scheduler.schedule()
        tokens = runner.run(batch, is_prefill)
        if step in (0, 2, 5):
            scheduler.preempt(batch[0])
            check_pool(scheduler)
        scheduler.postprocess(batch, tokens)
        check_pool(scheduler)
    assert [seq.completion_token_ids for seq in seqs] == [expected(seq) for seq in seqs]
