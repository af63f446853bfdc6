"""The page that documents the classic Scheduler, sentence by sentence, on a scheduler built with its five arguments only."""

from collections import deque
from typing import Any

import pytest

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence, SequenceStatus
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import LedgerRunner, check_pool, drive

PAGE_EXAMPLE = """
from myvllm.engine.scheduler import Scheduler
from myvllm.engine.sequence import Sequence
from myvllm.sampling_parameters import SamplingParams

scheduler = Scheduler(
    max_num_sequences=8,
    max_num_batched_tokens=512,
    max_cached_blocks=256,
    block_size=16,
    eos=151645,
)

params = SamplingParams(temperature=0.7, max_tokens=32)
seq = Sequence(token_ids=[1, 2, 3, 4], block_size=16, sampling_params=params)
scheduler.add_sequence(seq)

while not scheduler.is_finished():
    scheduled, is_prefill = scheduler.schedule()
    # ... run model and obtain token_ids ...
    token_ids = [42] * len(scheduled)  # placeholder
    scheduler.postprocess(scheduled, token_ids)
"""

EOS = 0


def prompt(length: int, start: int = 1) -> list[int]:
    return list(range(start, start + length))


def sequence(length: int, start: int = 1, *, request_id: str | None = None, **params: Any) -> Sequence:
    params = {"max_tokens": 8, "ignore_eos": True, **params}
    return Sequence(prompt(length, start), 4, SamplingParams(**params), request_id=request_id)


def step(scheduler: Scheduler, token: int = 7) -> tuple[list[Sequence], bool]:
    batch, is_prefill = scheduler.schedule()
    check_pool(scheduler)
    scheduler.postprocess(batch, [token] * len(batch))
    check_pool(scheduler)
    return batch, is_prefill


def test_the_example_of_the_page_runs_to_its_end() -> None:
    names: dict[str, object] = {}
    exec(PAGE_EXAMPLE.replace("myvllm", "minivllm_plugin"), names)
    seq = names["seq"]
    assert isinstance(seq, Sequence)
    assert seq.completion_token_ids == [42] * 32
    assert seq.finish_reason == "length"


# --- constructor and queues ----------------------------------------------------------------------------------------


def test_arguments_can_be_given_by_position_or_by_name() -> None:
    by_position = Scheduler(2, 64, 10, 4, EOS)
    by_name = Scheduler(max_num_sequences=2, max_num_batched_tokens=64, max_cached_blocks=10, block_size=4, eos=EOS)
    for scheduler in (by_position, by_name):
        assert scheduler.block_manager.num_blocks == 10  # passed on to the BlockManager
        assert scheduler.block_manager.block_size == 4


def test_the_queues_are_two_deques_and_start_empty() -> None:
    scheduler = Scheduler(2, 64, 10, 4, EOS)
    assert isinstance(scheduler.waiting, deque)
    assert isinstance(scheduler.running, deque)
    assert scheduler.is_finished()
    assert scheduler.schedule() == ([], False)


def test_waiting_sequences_hold_no_blocks_and_running_ones_do() -> None:
    scheduler = Scheduler(1, 64, 10, 4, EOS)
    first, second = sequence(5), sequence(5, 20)
    scheduler.add_sequence(first)
    scheduler.add_sequence(second)
    assert not first.block_table
    scheduler.schedule()
    assert list(scheduler.running) == [first]
    assert list(scheduler.waiting) == [second]
    assert len(first.block_table) == 2
    assert not second.block_table


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_max_num_sequences_bounds_prefill_and_decode_batches(limit: int) -> None:
    scheduler = Scheduler(limit, 64, 64, 4, EOS)
    for number in range(5):
        scheduler.add_sequence(sequence(3, 10 * number + 1))
    for batch in drive(scheduler, LedgerRunner.for_scheduler(scheduler)):
        assert len(batch.rows) <= limit


def test_prefill_counts_the_full_prompt_length() -> None:
    scheduler = Scheduler(8, 16, 64, 4, EOS)
    shared = [sequence(8, max_tokens=1) for _ in range(4)]  # equal prompts: what is cached counts all the same
    scheduler.add_sequence(shared[0])
    step(scheduler)
    for seq in shared[1:]:
        scheduler.add_sequence(seq)
    batch, is_prefill = step(scheduler)
    assert (batch, is_prefill) == (shared[1:3], True)
    assert [seq.num_cached_tokens for seq in batch] == [4, 4]


def test_decode_counts_one_token_a_sequence() -> None:
    scheduler = Scheduler(8, 4, 64, 4, EOS)
    seqs = [sequence(2, 10 * number + 1) for number in range(6)]
    for seq in seqs:
        scheduler.add_sequence(seq)
    while scheduler.waiting:
        step(scheduler)
    batch, is_prefill = scheduler.schedule()
    assert not is_prefill
    assert len(batch) == 4
    assert [seq.num_scheduled_tokens for seq in batch] == [1] * 4


# --- add_sequence and the prefill path -------------------------------------------------------------------------------


def test_add_sequence_appends_to_the_end_of_waiting() -> None:
    scheduler = Scheduler(2, 64, 10, 4, EOS)
    seqs = [sequence(3, 10 * number + 1) for number in range(4)]
    for seq in seqs:
        scheduler.add_sequence(seq)
    assert list(scheduler.waiting) == seqs
    assert all(seq.status is SequenceStatus.WAITING for seq in seqs)


def test_prefill_goes_front_to_back_and_moves_what_fits_to_running() -> None:
    scheduler = Scheduler(8, 64, 64, 4, EOS)
    seqs = [sequence(3, 10 * number + 1) for number in range(4)]
    for seq in seqs:
        scheduler.add_sequence(seq)
    batch, is_prefill = scheduler.schedule()
    assert is_prefill
    assert batch == seqs == list(scheduler.running)
    assert not scheduler.waiting
    assert all(seq.status is SequenceStatus.RUNNING for seq in seqs)
    assert [seq.num_scheduled_tokens for seq in batch] == [3] * 4


@pytest.mark.parametrize(
    ("scheduler", "lengths"),
    [
        (Scheduler(8, 64, 3, 4, EOS), (8, 8, 2)),  # blocks: the second needs two, one is left; the third would fit
        (Scheduler(8, 12, 64, 4, EOS), (8, 8, 2)),  # tokens
        (Scheduler(1, 64, 64, 4, EOS), (8, 8, 2)),  # sequences
    ],
    ids=["blocks", "tokens", "sequences"],
)
def test_prefill_stops_at_the_first_that_does_not_fit(scheduler: Scheduler, lengths: tuple[int, ...]) -> None:
    seqs = [sequence(length, 20 * number + 1) for number, length in enumerate(lengths)]
    for seq in seqs:
        scheduler.add_sequence(seq)
    batch, is_prefill = scheduler.schedule()
    assert (batch, is_prefill) == (seqs[:1], True)
    assert list(scheduler.waiting) == seqs[1:]


def test_decode_is_reached_only_when_nobody_is_admitted() -> None:
    scheduler = Scheduler(8, 64, 64, 4, EOS)
    first, second = sequence(3), sequence(3, 20)
    scheduler.add_sequence(first)
    assert step(scheduler) == ([first], True)
    scheduler.add_sequence(second)
    assert step(scheduler) == ([second], True)
    assert step(scheduler) == ([first, second], False)
    assert [first.num_completion_tokens, second.num_completion_tokens] == [2, 2]


def test_a_batch_with_anybody_admitted_is_a_prefill_even_if_one_token_is_left_to_compute() -> None:
    scheduler = Scheduler(2, 64, 5, 4, EOS)
    first, second = sequence(7, max_tokens=4), sequence(7, 20, max_tokens=4)
    scheduler.add_sequence(first)
    scheduler.add_sequence(second)
    while not second.num_preemptions or second.status is SequenceStatus.WAITING:
        batch, is_prefill = scheduler.schedule()
        admitted = second.num_preemptions > 0 and second in batch
        assert is_prefill == (admitted or scheduler.num_steps == 1)
        if admitted:
            assert (second.num_cached_tokens, second.num_scheduled_tokens) == (8, 1)
        scheduler.postprocess(batch, [7] * len(batch))


# --- the decode path and preemption ------------------------------------------------------------------------------------


def test_decode_preempts_when_there_is_no_block_for_the_next_token() -> None:
    scheduler = Scheduler(4, 64, 2, 4, EOS)
    first, second = sequence(4, request_id="A"), sequence(4, 20, request_id="B")
    scheduler.add_sequence(first)
    scheduler.add_sequence(second)
    step(scheduler)
    assert step(scheduler) == ([first], False)
    assert list(scheduler.running) == [first]
    assert list(scheduler.waiting) == [second]
    assert second.num_preemptions == 1


def test_the_victim_is_the_least_recently_scheduled() -> None:
    scheduler = Scheduler(4, 12, 4, 4, EOS)
    a, b, c, d = (sequence(length, 10 * number + 1) for number, length in enumerate((3, 3, 2, 2)))
    for seq in (a, b, c, d):
        scheduler.add_sequence(seq)
    assert step(scheduler) == ([a, b, c, d], True)
    scheduler.max_num_batched_tokens = 2  # two of the four at a time
    assert step(scheduler) == ([a, b], False)
    assert step(scheduler) == ([c, d], False)
    # "a" wants a second block and there is none: "b" has waited longest of the others, though it was not admitted last.
    assert step(scheduler) == ([a, c], False)
    assert list(scheduler.waiting) == [b]


def test_preempt_puts_to_the_front_frees_the_blocks_and_prefills_again() -> None:
    scheduler = Scheduler(4, 64, 16, 4, EOS)
    first, second, third = sequence(4), sequence(4, 20), sequence(4, 40)
    scheduler.add_sequence(first)
    scheduler.add_sequence(second)
    step(scheduler)
    scheduler.add_sequence(third)
    scheduler.preempt(first)
    check_pool(scheduler)
    assert list(scheduler.waiting) == [first, third]
    assert list(scheduler.running) == [second]
    assert first.status is SequenceStatus.WAITING
    assert not first.block_table
    assert scheduler.block_manager.num_free_blocks == 16 - len(second.block_table)
    batch, is_prefill = step(scheduler)
    assert (batch, is_prefill) == ([first, third], True)
    assert first.num_completion_tokens == 2  # the token from before the preemption is kept, one more was added


# --- postprocess and its three conditions -------------------------------------------------------------------------------


def test_postprocess_appends_the_token_and_ends_nobody_without_a_reason() -> None:
    scheduler = Scheduler(4, 64, 16, 4, EOS)
    seq = sequence(4)
    scheduler.add_sequence(seq)
    step(scheduler, token=9)
    assert seq.completion_token_ids == [9]
    assert (seq.last_token, seq.num_tokens) == (9, 5)
    assert seq.status is SequenceStatus.RUNNING


@pytest.mark.parametrize(
    ("params", "token", "reason"),
    [
        ({"ignore_eos": False}, EOS, "stop"),
        ({"ignore_eos": True}, EOS, None),
        ({"max_tokens": 1}, 7, "length"),
        ({"max_model_length": 5}, 7, "length"),
        ({"max_model_length": 6}, 7, None),
        ({"max_model_length": None}, 7, None),
        ({"max_model_length": 3}, 7, "length"),  # >=, not ==
    ],
)
def test_the_three_stopping_conditions(params: dict[str, Any], token: int, reason: str | None) -> None:
    scheduler = Scheduler(4, 64, 16, 4, EOS)
    seq = sequence(4, **params)
    scheduler.add_sequence(seq)
    step(scheduler, token)
    assert seq.finish_reason == reason
    assert seq.is_finished == (reason is not None)
    assert scheduler.is_finished() == seq.is_finished
    if reason is not None:
        assert seq not in scheduler.running
        assert scheduler.block_manager.num_free_blocks == 16
        assert seq.completion_token_ids == [token]


def test_postprocess_pairs_tokens_with_sequences_in_order() -> None:
    scheduler = Scheduler(4, 64, 16, 4, EOS)
    seqs = [sequence(3, 10 * number + 1) for number in range(3)]
    for seq in seqs:
        scheduler.add_sequence(seq)
    batch, _ = scheduler.schedule()
    scheduler.postprocess(batch, [101, 102, 103])
    assert [seq.last_token for seq in seqs] == [101, 102, 103]


def test_is_finished_only_when_both_queues_are_empty() -> None:
    scheduler = Scheduler(1, 64, 16, 4, EOS)
    scheduler.add_sequence(sequence(3, max_tokens=2))
    scheduler.add_sequence(sequence(3, 20, max_tokens=1))
    states = []
    while not scheduler.is_finished():
        states.append((len(scheduler.waiting), len(scheduler.running)))
        step(scheduler)
    assert states == [(2, 0), (1, 1), (1, 0)]
