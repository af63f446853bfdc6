"""Limits and turns: who waits for whom, and for how long. The comments name the reported case: A11."""

from collections.abc import Callable
from typing import Any

import pytest

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.testing import BatchRecord, HashedTokens, LedgerRunner, drive

EOS = 0
BLOCK_SIZES = [1, 2, 3, 4, 8, 16]

MakeSequence = Callable[..., Sequence]
RunAll = Callable[..., list[BatchRecord]]


def expected(seq: Sequence) -> list[int]:
    """What the request gets when nothing else exists: no scheduler, no pool."""
    return HashedTokens(1000).continue_prompt(seq.prompt_token_ids, seq.num_completion_tokens)


@pytest.mark.parametrize("budget", [2, 3, 4, 7])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_decode_never_waits_for_a_long_prompt(sequence: MakeSequence, budget: int, policy: Any) -> None:  # A11b
    scheduler = Scheduler(3, budget, 64, 4, EOS, enable_chunked_prefill=True, policy=policy)
    # not even if the long one ranks first
    decoder, long = sequence(2, 1, "decoder", priority=9, max_tokens=60), sequence(40, 50, "long", max_tokens=2)
    scheduler.add_sequence(decoder)
    batches = drive(scheduler, LedgerRunner.for_scheduler(scheduler), arrivals={3: [long]})
    until_first_token = [
        batch for batch in batches if any(row.request_id == "long" and row.num_computed < 40 for row in batch.rows)
    ]
    assert len(until_first_token) == -(-40 // (budget - 1))
    assert all("decoder" in batch.request_ids for batch in until_first_token)
    assert all(batch.num_tokens == budget for batch in until_first_token[:-1])


def test_with_a_budget_of_one_decode_and_prompt_take_turns(sequence: MakeSequence) -> None:
    scheduler = Scheduler(3, 2, 64, 4, EOS, enable_chunked_prefill=True)
    scheduler.add_sequence(sequence(1, 1, "decoder", max_tokens=40))
    scheduler.add_sequence(sequence(20, 50, "long", max_tokens=1))
    runner = LedgerRunner.for_scheduler(scheduler)
    batch, is_prefill = scheduler.schedule()
    scheduler.postprocess(batch, runner.run(batch, is_prefill))
    assert len(batch) == 2
    scheduler.max_num_batched_tokens = 1
    turns = [batch.request_ids[0] for batch in drive(scheduler, runner)]
    assert turns[:38] == ["decoder", "long"] * 19


def test_a_prompt_that_stood_back_takes_no_more_than_its_turn(sequence: MakeSequence) -> None:
    scheduler = Scheduler(8, 4, 64, 4, EOS, enable_chunked_prefill=True)
    for number in range(3):
        scheduler.add_sequence(sequence(1, 10 * number + 1, str(number), max_tokens=40))
    scheduler.add_sequence(sequence(30, 50, "long"))
    runner = LedgerRunner.for_scheduler(scheduler)
    batch, is_prefill = scheduler.schedule()
    scheduler.postprocess(batch, runner.run(batch, is_prefill))
    assert len(batch) == 4
    scheduler.max_num_batched_tokens = 3  # from now on one of the four stands back each time
    batches = drive(scheduler, runner)
    assert all(batch.num_tokens == len(batch.rows) == 3 for batch in batches[:30])
    assert [sum(name in batch.request_ids for batch in batches[:28]) for name in ("0", "1", "2", "long")] == [21] * 4


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
def test_more_decodes_than_the_budget_go_round(sequence: MakeSequence, budget: int, chunked: bool) -> None:
    scheduler = Scheduler(8, 6, 64, 4, EOS, enable_chunked_prefill=chunked)
    seqs = [sequence(1, 10 * number + 1, str(number), max_tokens=30) for number in range(6)]
    for seq in seqs:
        scheduler.add_sequence(seq)
    runner = LedgerRunner.for_scheduler(scheduler)
    batch, is_prefill = scheduler.schedule()
    scheduler.postprocess(batch, runner.run(batch, is_prefill))
    assert len(batch) == 6
    scheduler.max_num_batched_tokens = budget
    for _ in range(12):
        batch, is_prefill = scheduler.schedule()
        assert len(batch) == budget
        scheduler.postprocess(batch, runner.run(batch, is_prefill))
        gained = [seq.num_completion_tokens for seq in seqs]
        assert max(gained) - min(gained) <= 1


def test_a_big_prompt_is_not_overtaken_for_ever(sequence: MakeSequence, mode: Any) -> None:
    scheduler = Scheduler(4, 64, 8, 4, EOS, **mode)
    big = sequence(32, 500, "big", max_tokens=1)  # needs the whole pool
    scheduler.add_sequence(sequence(4, 1, "first"))
    arrivals = {1: [big], **{step: [sequence(4, 10 * step, f"small-{step}")] for step in range(2, 30)}}
    batches = drive(scheduler, LedgerRunner.for_scheduler(scheduler), 400, arrivals=arrivals)
    first_turn = next(index for index, batch in enumerate(batches) if "big" in batch.request_ids)
    assert first_turn <= 12
    assert all(not name.startswith("small") for batch in batches[:first_turn] for name in batch.request_ids)


def test_an_admissible_request_is_admitted_although_running_ones_hold_a_reserve(
    sequence: MakeSequence, run_all: RunAll, mode: Any
) -> None:
    scheduler = Scheduler(8, 64, 8, 4, EOS, **mode)
    seqs = [sequence(4, 10 * number + 1, str(number), max_tokens=12) for number in range(7)]
    run_all(scheduler, [*seqs, sequence(29, 200, "last", max_tokens=2)], 300)


def test_those_who_fit_their_blocks_to_the_end_keep_no_reserve(sequence: MakeSequence) -> None:
    scheduler = Scheduler(8, 64, 4, 16, EOS, enable_chunked_prefill=True)
    for number in range(4):  # 4 + 13 tokens, of which the last needs no slot: none will ever need a second block
        scheduler.add_sequence(sequence(4, 20 * number + 1, str(number), max_tokens=13))
    runner = LedgerRunner.for_scheduler(scheduler)
    late = sequence(4, 100, "late")
    batches = drive(scheduler, runner, arrivals={1: [late]})
    assert len(batches[0].rows) == 4
    assert scheduler.num_preemptions == 0
    assert len(batches) == 13 + 8  # "late" starts when the first of the four ends

    for number in range(3):
        scheduler.add_sequence(sequence(4, 20 * number + 1, str(number), max_tokens=13))
    batches = drive(scheduler, runner, arrivals={1: [sequence(4, 100, "beside")]})
    assert "beside" in batches[1].request_ids


def test_those_who_may_grow_keep_a_block_each(sequence: MakeSequence) -> None:
    scheduler = Scheduler(8, 64, 6, 4, EOS, enable_chunked_prefill=True)
    for number in range(3):
        scheduler.add_sequence(sequence(3, 20 * number + 1, str(number), max_tokens=None if number else 4))
    batches = drive(scheduler, LedgerRunner.for_scheduler(scheduler), arrivals={1: [sequence(3, 100, "late")]})
    first_turn = next(index for index, batch in enumerate(batches) if "late" in batch.request_ids)
    assert first_turn > 1
