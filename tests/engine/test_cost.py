"""What a step costs does not depend on who waits. Counted in function calls, so that no clock and no other load matters."""

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.engine.snapshot import take_snapshot
from minivllm_plugin.sampling_parameters import SamplingParams

PARAMS = SamplingParams(max_tokens=200, ignore_eos=True)


def count_calls(work: Callable[[], object]) -> int:
    """Python and C function calls made by ``work``."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    previous = sys.getprofile()
    gc.collect()
    gc.disable()  # finalizers of what earlier tests left would be counted, too
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(previous)
        gc.enable()
    return calls


def busy(num_running: int, num_waiting: int, policy: Any = "fcfs", num_blocks: int | None = None) -> Scheduler:
    num_blocks = num_blocks or num_running * 20
    scheduler = Scheduler(num_running, 4096, num_blocks, 16, 0, enable_chunked_prefill=True, policy=policy)
    for number in range(num_running + num_waiting):
        scheduler.add_sequence(Sequence([number % 997] * 20, sampling_params=PARAMS, priority=number % 3))
    step(scheduler)
    while len(scheduler.running) < num_running:
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> None:
    batch, _ = scheduler.schedule()
    scheduler.postprocess(batch, [7] * len(batch))


def step_calls(scheduler: Scheduler) -> int:
    """Of the cheapest of three steps: now and then something else of the interpreter's is counted with one."""
    return min(count_calls(lambda: step(scheduler)) for _ in range(3))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_step_does_not_look_at_those_who_wait(policy: Any) -> None:
    assert step_calls(busy(64, 10, policy)) == step_calls(busy(64, 10_000, policy))


def test_a_step_that_cannot_admit_looks_at_the_first_who_waits_only() -> None:
    few, many = busy(16, 10, num_blocks=64), busy(16, 10_000, num_blocks=64)
    few.max_num_sequences = many.max_num_sequences = 1000  # seats are free, blocks are not
    assert step_calls(few) == step_calls(many)


def test_a_step_grows_in_proportion_to_those_who_run() -> None:
    few, many = busy(16, 0), busy(256, 0)
    assert step_calls(many) / 256 <= 1.2 * step_calls(few) / 16


def test_a_picture_of_a_long_queue_shows_its_head_and_counts_the_rest() -> None:
    picture = take_snapshot(busy(16, 10_000))
    assert picture.num_waiting == 10_000
    assert len(picture.sequences) == 116
