"""The frozen picture of the engine: right in every state, and never changed afterwards."""

from dataclasses import FrozenInstanceError
from types import SimpleNamespace

import pytest

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.engine.snapshot import take_snapshot
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import LedgerRunner, drive


def test_an_engine_at_rest() -> None:
    picture = take_snapshot(Scheduler(2, 64, 10, 4, 0))
    assert (picture.num_waiting, picture.num_running, picture.sequences) == (0, 0, ())
    assert (picture.num_blocks, picture.num_free_blocks, picture.num_used_blocks, picture.num_cached_blocks) == (10, 10, 0, 0)
    assert picture.prefix_hit_rate == 0.0


def test_every_state_is_shown_and_frozen() -> None:
    scheduler = Scheduler(2, 64, 10, 4, 0)
    runner = LedgerRunner.for_scheduler(scheduler)
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    for name in "abc":
        scheduler.add_sequence(Sequence(list(range(1, 10)), sampling_params=params, request_id=name))
    batch, is_prefill = scheduler.schedule()
    scheduler.postprocess(batch, runner.run(batch, is_prefill))
    scheduler.preempt(batch[1])
    picture = take_snapshot(scheduler)
    assert {view.request_id: view.status for view in picture.sequences} == {"a": "running", "b": "preempted", "c": "waiting"}
    view = picture.sequences[0]
    assert (view.num_prompt_tokens, view.num_completion_tokens, view.num_computed_tokens) == (9, 1, 9)
    assert view.block_ids == tuple(batch[0].block_table)
    assert (picture.step, picture.num_waiting, picture.num_running, picture.num_preemptions) == (1, 2, 1, 1)
    assert (picture.num_used_blocks, picture.num_free_blocks) == (3, 7)
    assert picture.num_cached_blocks == 0  # what is indexed is held by "a"

    drive(scheduler, runner)
    assert view.block_ids
    later = take_snapshot(scheduler)
    assert (later.num_waiting, later.num_running, later.num_free_blocks) == (0, 0, 10)
    assert later.num_cached_blocks == len(scheduler.block_manager.hash_to_block_id) > 0
    assert 0.0 < later.prefix_hit_rate < 1.0
    assert later.prefix_hit_tokens == scheduler.block_manager.statistics.hit_tokens
    with pytest.raises(FrozenInstanceError):
        later.step = 5  # type: ignore[misc]


def test_what_the_runner_counts_is_in_the_picture() -> None:
    counts = SimpleNamespace(graph_replays=7, graph_captures=2, eager_steps={"a prompt in the batch": 3})
    picture = take_snapshot(Scheduler(2, 64, 10, 4, 0), SimpleNamespace(counts=counts))
    assert (picture.num_graph_replays, picture.num_graph_captures) == (7, 2)
    assert picture.eager_steps == (("a prompt in the batch", 3),)
    assert take_snapshot(Scheduler(2, 64, 10, 4, 0), object()).eager_steps == ()
