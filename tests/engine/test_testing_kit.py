"""The test kit notices what it is there to notice: each fault is built in by hand, and the message names it."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

import minivllm_plugin.testing
from minivllm_plugin.engine.llm_engine import Runner
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import MAX_TOKEN_ID, Sequence, SequenceStatus
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import (
    BatchRecord,
    HashedTokens,
    InvariantError,
    LedgerRunner,
    RowRecord,
    ScriptedLogits,
    assert_invariants,
    check_pool,
    drive,
)

MakeSequence = Callable[..., Sequence]


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(4, 64, 16, 4, 0, enable_chunked_prefill=True)


def start(scheduler: Scheduler, *seqs: Sequence) -> tuple[LedgerRunner, list[Sequence]]:
    """Prefill ``seqs`` and schedule their first decode."""
    runner = LedgerRunner.for_scheduler(scheduler)
    for seq in seqs:
        scheduler.add_sequence(seq)
    batch, is_prefill = scheduler.schedule()
    scheduler.postprocess(batch, runner.run(batch, is_prefill))
    return runner, scheduler.schedule()[0]


def test_the_example_of_the_docstring_runs() -> None:
    example = (minivllm_plugin.testing.__doc__ or "").split("::\n\n")[1].split("\n\n:class:")[0]
    names: dict[str, Any] = {}
    exec("\n".join(line[4:] for line in example.splitlines()), names)
    assert len(names["batches"]) == 16


def test_a_ledger_is_a_runner(scheduler: Scheduler) -> None:
    runner: Runner = LedgerRunner.for_scheduler(scheduler)
    assert isinstance(runner, LedgerRunner)


# --- the ledger -------------------------------------------------------------------------------------------------------


def test_reading_a_block_of_somebody_else(scheduler: Scheduler, sequence: MakeSequence) -> None:
    a, b = sequence(5, 1, "a"), sequence(5, 20, "b")
    runner, batch = start(scheduler, a, b)
    a.block_table[0] = b.block_table[0]
    with pytest.raises(InvariantError, match=r"reads token 1 at position 0 .* which holds token 20 at position 0"):
        runner.run(batch, False)


def test_reading_a_slot_that_nobody_wrote(scheduler: Scheduler, sequence: MakeSequence) -> None:
    a = sequence(5, 1, "a")
    runner, batch = start(scheduler, a)
    a.block_table[0] = 9
    with pytest.raises(InvariantError, match="from block 9, which nobody wrote"):
        runner.run(batch, False)


def test_reading_what_was_poisoned(scheduler: Scheduler, sequence: MakeSequence) -> None:
    a = sequence(5, 1, "a")
    runner, batch = start(scheduler, a)
    runner.poison(a.block_table[0])
    with pytest.raises(InvariantError, match="which nobody wrote"):
        runner.run(batch, False)


def test_skipping_a_token(scheduler: Scheduler, sequence: MakeSequence) -> None:
    a = sequence(5, 1, "a")
    runner = LedgerRunner.for_scheduler(scheduler)
    scheduler.add_sequence(a)
    batch, _ = scheduler.schedule()
    a.num_computed_tokens, a.num_scheduled_tokens = 1, 4
    with pytest.raises(InvariantError, match=r"reads token 1 at position 0 .* which nobody wrote"):
        runner.run(batch, True)


@pytest.mark.parametrize(("salt", "prompt"), [("x", [1, 2, 3, 4, 5, 6, 7, 8, 9]), (None, [7, 7, 7, 7, 5, 6, 7, 8, 9])])
def test_the_same_token_after_another_history(scheduler: Scheduler, salt: str | None, prompt: list[int]) -> None:
    a = Sequence([1, 2, 3, 4, 5, 6, 7, 8, 9], request_id="a")
    b = Sequence(prompt, request_id="b", cache_salt=salt)
    runner, batch = start(scheduler, a, b)
    b.block_table[1] = a.block_table[1]  # tokens 5 .. 8 at positions 4 .. 7 in both
    with pytest.raises(InvariantError, match="holds that token after another history"):
        runner.run(batch, False)


def test_two_rows_that_write_one_slot(scheduler: Scheduler, sequence: MakeSequence) -> None:
    a, b = sequence(5, 1, "a"), sequence(5, 20, "b")
    runner, batch = start(scheduler, a, b)
    b.block_table[1] = a.block_table[1]
    with pytest.raises(InvariantError, match=r"writes slot 1 of block .* and so does another row"):
        runner.run(batch, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda seq: setattr(seq, "num_scheduled_tokens", 0), "nothing to compute"),
        (lambda seq: setattr(seq, "num_scheduled_tokens", 2), "more than it has left"),
        (lambda seq: setattr(seq, "status", SequenceStatus.WAITING), "not running"),
        (lambda seq: seq.block_table.clear(), "too few blocks for 6 tokens"),
        (lambda seq: seq.block_table.append(16), "outside the pool of 16"),
        (lambda seq: seq.block_table.append(-1), "outside the pool of 16"),
        (lambda seq: setattr(seq, "num_computed_tokens", 4), "computes prompt tokens in a batch that is called a decode batch"),
    ],
)
def test_malformed_rows(scheduler: Scheduler, sequence: MakeSequence, change: Callable[[Sequence], None], message: str) -> None:
    a = sequence(5, 1, "a")
    runner, batch = start(scheduler, a)
    change(a)
    with pytest.raises(InvariantError, match=message):
        runner.run(batch, False)


def test_malformed_batches(scheduler: Scheduler, sequence: MakeSequence) -> None:
    a, b = sequence(5, 1, "a"), sequence(5, 20, "b")
    runner, batch = start(scheduler, a, b)
    with pytest.raises(InvariantError, match="an empty batch"):
        runner.run([], False)
    with pytest.raises(InvariantError, match="stands twice"):
        runner.run([a, a], False)
    runner.max_num_batched_tokens = 1
    with pytest.raises(InvariantError, match="2 tokens in one batch, the budget is 1"):
        runner.run(batch, False)


def test_rows_that_are_not_complete_get_a_token_that_stands_out(sequence: MakeSequence) -> None:
    scheduler = Scheduler(4, 4, 16, 4, 0, enable_chunked_prefill=True)
    scheduler.add_sequence(sequence(6, 1, "a"))
    runner = LedgerRunner.for_scheduler(scheduler)
    batch, is_prefill = scheduler.schedule()
    assert runner.run(batch, is_prefill) == [MAX_TOKEN_ID]
    assert list(runner.batches) == [BatchRecord(True, (RowRecord("a", 0, 4),))]
    assert (runner.batches[0].num_tokens, runner.batches[0].request_ids) == (4, ("a",))


def test_a_gate_holds_the_runner_back(scheduler: Scheduler, sequence: MakeSequence, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    runner = LedgerRunner.for_scheduler(scheduler, gate=gate)
    scheduler.add_sequence(sequence(5, 1, "a"))
    batch, is_prefill = scheduler.schedule()
    answers: list[list[int]] = []
    thread = threading.Thread(target=lambda: answers.append(runner.run(batch, is_prefill)))
    thread.start()
    assert runner.entered.wait(10)
    assert answers == []
    gate.set()
    thread.join(10)
    assert answers == [HashedTokens(1000).continue_prompt([1, 2, 3, 4, 5], 1)]

    gate.clear()
    monkeypatch.setattr("minivllm_plugin.testing.ledger.GATE_SECONDS", 0.01)
    with pytest.raises(InvariantError, match="the gate was not opened"):
        runner.run(batch, is_prefill)


def test_an_id_that_is_used_again_starts_a_new_history(scheduler: Scheduler) -> None:
    choose = ScriptedLogits([1.0] * 50)
    runner = LedgerRunner.for_scheduler(scheduler, choose=choose)
    params = SamplingParams(seed=3, max_tokens=6, ignore_eos=True)
    answers = []
    for _ in range(2):
        seq = Sequence([1, 2, 3], sampling_params=params, request_id="a")
        scheduler.add_sequence(seq)
        drive(scheduler, runner)
        answers.append(seq.completion_token_ids)
    assert answers[0] == answers[1]


# --- pool and driving ---------------------------------------------------------------------------------------------------


def break_free_list(scheduler: Scheduler) -> None:
    scheduler.block_manager._free.popitem()


def free_a_used_block(scheduler: Scheduler) -> None:
    scheduler.block_manager._free[scheduler.running[0].block_table[0]] = None


def count_wrong(scheduler: Scheduler) -> None:
    scheduler.block_manager.blocks[scheduler.running[0].block_table[0]].ref_count += 1


def lose_a_sequence(scheduler: Scheduler) -> None:
    seq = scheduler.running.pop()
    scheduler.block_manager.deallocate(seq)


def seat_too_many(scheduler: Scheduler) -> None:
    scheduler.max_num_sequences = 1


def point_elsewhere(scheduler: Scheduler) -> None:
    scheduler.block_manager.hash_to_block_id[5] = 3


def wait_with_blocks(scheduler: Scheduler) -> None:
    scheduler.waiting.append(scheduler.running.pop())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_free_list, "neither free nor used"),
        (free_a_used_block, "free and used"),
        (count_wrong, "is in 1 block tables"),
        (lose_a_sequence, "2 are live"),
        (seat_too_many, "2 sequences run, the limit is 1"),
        (point_elsewhere, "index"),
        (wait_with_blocks, "waits in another state"),
    ],
)
def test_check_pool_names_the_damage(
    scheduler: Scheduler, sequence: MakeSequence, damage: Callable[[Scheduler], None], message: str
) -> None:
    start(scheduler, sequence(5, 1, "a"), sequence(5, 20, "b"))
    check_pool(scheduler)
    damage(scheduler)
    with pytest.raises(AssertionError, match=message):
        check_pool(scheduler)


def test_assert_invariants_follows_every_sequence(scheduler: Scheduler, sequence: MakeSequence) -> None:
    a, b = sequence(5, 1, "a"), sequence(5, 20, "b")
    start(scheduler, a, b)
    assert_invariants(scheduler, [a, b])
    with pytest.raises(InvariantError, match="not where its status says"):
        assert_invariants(scheduler, [a, b, sequence(3, 1, "never added")])
    scheduler.abort("a")
    assert_invariants(scheduler, [a, b])
    a.finish_reason = None
    with pytest.raises(InvariantError, match="has finish reason None"):
        assert_invariants(scheduler, [a, b])
    a.finish_reason = "abort"
    a.block_table.append(3)
    with pytest.raises(InvariantError, match="has ended but holds blocks"):
        assert_invariants(scheduler, [a, b])


def test_drive_reports_a_livelock_and_a_stall(
    scheduler: Scheduler, sequence: MakeSequence, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.add_sequence(sequence(5, 1, "a", max_tokens=30))
    runner = LedgerRunner.for_scheduler(scheduler)
    with pytest.raises(InvariantError, match="unfinished after 4 steps"):
        drive(scheduler, runner, 4)
    monkeypatch.setattr(scheduler, "schedule", lambda: ([], False))
    with pytest.raises(InvariantError, match="nothing is scheduled"):
        drive(scheduler, runner)


def test_drive_waits_for_late_arrivals(scheduler: Scheduler, sequence: MakeSequence) -> None:
    late = sequence(3, 1, "late", max_tokens=1)
    batches = drive(scheduler, LedgerRunner.for_scheduler(scheduler), arrivals={7: [late]})
    assert [batch.request_ids for batch in batches] == [("late",)]
    assert late.is_finished
