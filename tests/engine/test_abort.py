"""Abort in every state a request can be in: its blocks come back, its id is free, nobody else notices. The case: E01."""

from collections.abc import Callable
from typing import Any

import pytest

from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence, SequenceStatus
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import HashedTokens, LedgerRunner, assert_invariants, check_pool, drive

EOS = 0

MakeSequence = Callable[..., Sequence]


def step(scheduler: Scheduler, runner: LedgerRunner) -> list[Sequence]:
    batch, is_prefill = scheduler.schedule()
    scheduler.postprocess(batch, runner.run(batch, is_prefill))
    check_pool(scheduler)
    return batch


def wait_for_turn(scheduler: Scheduler, runner: LedgerRunner, seq: Sequence) -> None:
    """It waits behind somebody else."""
    assert seq.status is SequenceStatus.WAITING
    assert not seq.num_preemptions


def between_chunks(scheduler: Scheduler, runner: LedgerRunner, seq: Sequence) -> None:
    while not 0 < seq.num_computed_tokens < seq.num_prompt_tokens:
        step(scheduler, runner)


def decoding(scheduler: Scheduler, runner: LedgerRunner, seq: Sequence) -> None:
    while seq.num_completion_tokens < 2:
        step(scheduler, runner)


def preempted(scheduler: Scheduler, runner: LedgerRunner, seq: Sequence) -> None:
    decoding(scheduler, runner, seq)
    scheduler.preempt(seq)


def preempted_between_chunks(scheduler: Scheduler, runner: LedgerRunner, seq: Sequence) -> None:
    between_chunks(scheduler, runner, seq)
    scheduler.preempt(seq)


def resumed(scheduler: Scheduler, runner: LedgerRunner, seq: Sequence) -> None:
    preempted(scheduler, runner, seq)
    while seq.status is SequenceStatus.WAITING:
        step(scheduler, runner)


STATES = [wait_for_turn, between_chunks, decoding, preempted, preempted_between_chunks, resumed]


@pytest.mark.parametrize("reach", STATES)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_abort_between_steps(sequence: MakeSequence, reach: Callable[..., None], policy: Any) -> None:
    scheduler = Scheduler(4, 5, 32, 4, EOS, enable_chunked_prefill=True, policy=policy)
    runner = LedgerRunner.for_scheduler(scheduler)
    neighbour, seq = sequence(9, 1, "neighbour"), sequence(13, 1, "it")  # they share two blocks
    scheduler.add_sequence(neighbour)
    scheduler.add_sequence(seq)
    reach(scheduler, runner, seq)
    tokens = seq.completion_token_ids
    assert scheduler.abort("it") is seq
    assert_invariants(scheduler, [neighbour, seq])
    assert (seq.finish_reason, seq.completion_token_ids) == ("abort", tokens)
    assert scheduler.get("it") is None
    assert scheduler.abort("it") is None  # unknown by now
    again = sequence(13, 1, "it")
    scheduler.add_sequence(again)
    drive(scheduler, runner)
    for survivor in (neighbour, again):
        assert survivor.completion_token_ids == HashedTokens(1000).continue_prompt(survivor.prompt_token_ids, 8)
    assert seq.completion_token_ids == tokens
    assert scheduler.block_manager.num_free_blocks == 32


@pytest.mark.parametrize("when", ["before run", "after run"])
@pytest.mark.parametrize("at_step", range(6))
def test_abort_between_schedule_and_postprocess(sequence: MakeSequence, mode: Any, when: str, at_step: int) -> None:
    scheduler = Scheduler(4, 16, 32, 4, EOS, **mode)
    runner = LedgerRunner.for_scheduler(scheduler)
    neighbour, seq = sequence(5, 1, "neighbour"), sequence(9, 1, "it")
    scheduler.add_sequence(neighbour)
    scheduler.add_sequence(seq)
    for _ in range(at_step):
        step(scheduler, runner)
    batch, is_prefill = scheduler.schedule()
    length = seq.num_tokens
    if when == "before run":
        scheduler.abort("it")
    tokens = runner.run(batch, is_prefill)
    if when == "after run":
        scheduler.abort("it")
    again = sequence(9, 1, "it")
    scheduler.add_sequence(again)  # the id is free at once, and the old batch must not touch its new owner
    check_pool(scheduler)
    scheduler.postprocess(batch, tokens)
    check_pool(scheduler)
    assert (seq.finish_reason, seq.num_tokens) == ("abort", length)
    assert again.num_completion_tokens == 0
    drive(scheduler, runner)
    for survivor in (neighbour, again):
        assert survivor.completion_token_ids == HashedTokens(1000).continue_prompt(survivor.prompt_token_ids, 8)


def test_abort_in_the_step_that_finishes_it_comes_too_late(sequence: MakeSequence) -> None:
    scheduler = Scheduler(4, 64, 32, 4, EOS)
    seq = sequence(3, 1, "it", max_tokens=1)
    scheduler.add_sequence(seq)
    step(scheduler, LedgerRunner.for_scheduler(scheduler))
    assert scheduler.abort("it") is None
    assert seq.finish_reason == "length"


def test_unknown_ids_are_ignored() -> None:
    scheduler = Scheduler(4, 64, 32, 4, EOS)
    assert scheduler.abort("nobody") is None
    check_pool(scheduler)


def test_blocks_shared_with_others_stay(sequence: MakeSequence) -> None:
    scheduler = Scheduler(4, 64, 32, 4, EOS)
    runner = LedgerRunner.for_scheduler(scheduler)
    first = sequence(9, 1, "first")
    scheduler.add_sequence(first)
    step(scheduler, runner)
    second = sequence(9, 1, "second")
    scheduler.add_sequence(second)
    step(scheduler, runner)
    shared = set(first.block_table) & set(second.block_table)
    assert len(shared) == 2
    scheduler.abort("first")
    assert shared <= set(second.block_table)
    assert not shared & set(scheduler.block_manager.free_block_ids)
    drive(scheduler, runner)
    assert second.completion_token_ids == HashedTokens(1000).continue_prompt(second.prompt_token_ids, 8)


def test_aborting_everybody_leaves_a_whole_pool(sequence: MakeSequence, mode: Any) -> None:
    scheduler = Scheduler(3, 16, 8, 4, EOS, **mode)
    runner = LedgerRunner.for_scheduler(scheduler)
    seqs = [sequence(5, 10 * number + 1, str(number)) for number in range(8)]
    for seq in seqs:
        scheduler.add_sequence(seq)
    for _ in range(4):
        step(scheduler, runner)
    for seq in seqs:
        scheduler.abort(seq.request_id or "")
        assert_invariants(scheduler, seqs)
    assert scheduler.is_finished()
    assert scheduler.block_manager.num_free_blocks == 8
    assert scheduler.schedule() == ([], False)


class AbortingRunner(LedgerRunner):
    """Aborts a request of its own batch while it computes, as a hook could."""

    engine: LLMEngine

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        tokens = super().run(seqs, is_prefill)
        if self.num_calls == 2:
            self.engine.abort("it")
        return tokens


def test_an_abort_during_a_step_is_reported_once(mode: Any) -> None:
    scheduler = Scheduler(4, 64, 32, 4, EOS, **mode)
    runner = AbortingRunner(32, 4)
    engine = LLMEngine(scheduler, runner, Limits(1000, 100))
    runner.engine = engine
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    for name in ("neighbour", "it"):
        engine.add_prompt([1, 2, 3], params, request_id=name)
    endings = []
    while not scheduler.is_finished():
        endings += [(one.request_id, one.finish_reason) for one in engine.step().progress if one.finish_reason]
    assert endings == [("neighbour", "length")]  # the abort's caller knows of the other one
