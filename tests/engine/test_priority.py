"""The ``priority`` policy: smaller numbers first, then arrival; the victim is the opposite end; everybody ends."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence, SequenceStatus
from minivllm_plugin.testing import BatchRecord, LedgerRunner, check_pool, drive

EOS = 0

MakeSequence = Callable[..., Sequence]
RunAll = Callable[..., list[BatchRecord]]


def scheduler_of(max_num_sequences: int, num_blocks: int, chunked: bool, budget: int = 64) -> Scheduler:
    return Scheduler(max_num_sequences, budget, num_blocks, 4, EOS, enable_chunked_prefill=chunked, policy="priority")


@pytest.mark.parametrize("chunked", [False, True])
def test_smaller_numbers_go_first_and_equals_by_arrival(sequence: MakeSequence, chunked: bool) -> None:
    scheduler = scheduler_of(1, 32, chunked)
    for name, priority in (("a", 5), ("b", 0), ("c", -3), ("d", 0), ("e", 5)):
        scheduler.add_sequence(sequence(3, 1, name, priority=priority, max_tokens=2))
    assert [seq.request_id for seq in scheduler.waiting] == ["c", "b", "d", "a", "e"]
    batches = drive(scheduler, LedgerRunner.for_scheduler(scheduler))
    assert [batch.request_ids[0] for batch in batches] == ["c", "c", "b", "b", "d", "d", "a", "a", "e", "e"]


def test_fcfs_does_not_look_at_it(sequence: MakeSequence) -> None:
    scheduler = Scheduler(1, 64, 32, 4, EOS)
    for name, priority in (("a", 5), ("b", 0)):
        scheduler.add_sequence(sequence(3, 1, name, priority=priority))
    assert [seq.request_id for seq in scheduler.waiting] == ["a", "b"]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("needy_first", [False, True])
def test_the_victim_has_the_lowest_rank_whoever_needs_the_block(sequence: MakeSequence, chunked: bool, needy_first: bool) -> None:
    scheduler = scheduler_of(4, 2, chunked)
    high, low = sequence(4, 1, "high", priority=0), sequence(4, 20, "low", priority=9)
    for seq in (high, low) if needy_first else (low, high):
        scheduler.add_sequence(seq)
    batches = drive(scheduler, LedgerRunner.for_scheduler(scheduler))
    assert high.num_preemptions == 0
    assert low.num_preemptions > 0
    names = [batch.request_ids for batch in batches]
    last_of_high = max(index for index, batch in enumerate(names) if "high" in batch)
    assert all("low" not in batch for batch in names[1 : last_of_high + 1])


@pytest.mark.parametrize("chunked", [False, True])
def test_who_runs_with_a_low_rank_makes_room_even_if_it_was_there_first(sequence: MakeSequence, chunked: bool) -> None:
    """All need a block in the same step. The lowest must not take the last free one before the highest had its turn."""
    scheduler = scheduler_of(4, 7, chunked)
    ranks = {"low": 9, "middle": 5, "high": 0}
    for number, (name, priority) in enumerate(ranks.items()):
        scheduler.add_sequence(sequence(8, 20 * number + 1, name, priority=priority))
    runner = LedgerRunner.for_scheduler(scheduler)
    for _ in range(2):
        batch, is_prefill = scheduler.schedule()
        check_pool(scheduler)
        scheduler.postprocess(batch, runner.run(batch, is_prefill))
    assert [seq.request_id for seq in scheduler.waiting] == ["low"]
    assert {seq.request_id for seq in scheduler.running} == {"middle", "high"}


@pytest.mark.parametrize("chunked", [False, True])
def test_a_preempted_sequence_returns_to_its_place(sequence: MakeSequence, chunked: bool) -> None:
    scheduler = scheduler_of(2, 32, chunked)
    runner = LedgerRunner.for_scheduler(scheduler)
    for name, priority in (("a", 1), ("b", 3)):
        scheduler.add_sequence(sequence(3, 1, name, priority=priority))
    batch, is_prefill = scheduler.schedule()
    scheduler.postprocess(batch, runner.run(batch, is_prefill))
    for name, priority in (("c", 3), ("d", 2), ("e", 0)):
        scheduler.add_sequence(sequence(3, 1, name, priority=priority))
    running = {seq.request_id: seq for seq in scheduler.running}
    scheduler.preempt(running["b"])
    assert [seq.request_id for seq in scheduler.waiting] == ["e", "d", "b", "c"]  # before c: it arrived earlier
    scheduler.preempt(running["a"])
    assert [seq.request_id for seq in scheduler.waiting] == ["e", "a", "d", "b", "c"]
    drive(scheduler, runner)


@pytest.mark.parametrize("seed", range(30))
def test_no_inversion_while_running_and_everybody_ends(
    sequence: MakeSequence, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    chunked = rng.random() < 0.5
    scheduler = scheduler_of(rng.randint(1, 4), rng.randint(3, 7), chunked, rng.choice([13, 64]))
    arrivals: dict[int, list[Sequence]] = {}
    for number in range(12):
        seq = sequence(rng.randint(1, 12), 20 * number + 1, str(number), priority=rng.randint(0, 2), max_tokens=rng.randint(1, 8))
        arrivals.setdefault(rng.randint(0, 20), []).append(seq)
    sequences = [seq for seqs in arrivals.values() for seq in seqs]
    preempt = scheduler.preempt

    def watched(victim: Sequence) -> None:
        for other in scheduler.running:
            assert other.priority <= victim.priority, f"{victim!r} makes room although {other!r} ranks lower"
        preempt(victim)

    monkeypatch.setattr(scheduler, "preempt", watched)
    drive(scheduler, LedgerRunner.for_scheduler(scheduler), 1000, arrivals=arrivals)
    assert all(seq.is_finished for seq in sequences)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_low_priority_waits_no_longer_than_the_others_keep_coming(sequence: MakeSequence, chunked: bool) -> None:
    scheduler = scheduler_of(2, 8, chunked)
    low = sequence(8, 900, "low", priority=9, max_tokens=4)
    scheduler.add_sequence(sequence(4, 1, "first", priority=0))
    arrivals: dict[int, list[Any]] = {1: [low]}
    for number in range(10):
        arrivals.setdefault(2 + 3 * number, []).append(sequence(4, 20 * number + 1, f"high-{number}", priority=0, max_tokens=8))
    batches = drive(scheduler, LedgerRunner.for_scheduler(scheduler), arrivals=arrivals)
    names = [batch.request_ids for batch in batches]
    last_high = max(index for index, batch in enumerate(names) if any(name.startswith("high") for name in batch))
    assert len(names) - last_high <= 8
    assert low.status is SequenceStatus.FINISHED
