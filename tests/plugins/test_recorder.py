"""The recorder and the virtual clock: what they write down on a live and on a hand-driven engine, and what they notice."""

import itertools
import random
import threading
from typing import Any

import pytest
from plugin_bench import Bench, make_plugin, prompts, raising

from minivllm_plugin.errors import RequestRejectedError
from minivllm_plugin.events import BlocksFreed
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import EventRecorder, InvariantError, RecordedRequest, VirtualClock, scripted_llm
from minivllm_plugin.views import Reject

PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


def test_one_request_on_a_live_engine() -> None:
    recorder = EventRecorder()
    llm, _ = scripted_llm(options={"plugins": [recorder]})
    with llm:
        tokens = llm.submit([1, 2, 3, 4, 5], PARAMS, request_id="a").result().outputs[0].token_ids
    assert recorder.hooks() == [
        "engine_started",
        "request_queued",
        *("step_started", "step_finished", "blocks_changed") * 1,
        *("step_started", "step_finished") * 1,
        *("step_started", "step_finished", "blocks_changed", "request_finished"),
        "engine_stopped",
    ]
    assert recorder.timeline("a") == ["queued", "scheduled", "token", "token", "token", "length"]
    assert recorder.requests["a"].token_ids == tokens
    assert recorder.requests["a"].outcome is not None
    recorder.assert_consistent()


def test_preemptions_aborts_rejections_and_a_reused_id() -> None:
    recorder = EventRecorder("watch")
    policy = make_plugin(admit=lambda request: Reject("no") if request.request_id == "no" else None)
    bench = Bench(plugins=[recorder], policies=[policy], num_blocks=6, max_num_sequences=3)
    for number, prompt in enumerate(prompts(3, 6)):
        bench.add(prompt, 12, request_id=f"r{number}")
    with pytest.raises(RequestRejectedError):
        bench.add([1], request_id="no")
    while not bench.scheduler.num_preemptions:
        bench.step()
    recorder.assert_consistent(all_ended=False)
    with pytest.raises(InvariantError, match="request 'r0' has not ended"):
        recorder.assert_consistent()
    bench.engine.abort("r0")
    bench.add([1, 2], 1, request_id="r0")
    bench.finish()
    recorder.assert_consistent()
    assert recorder.timeline("no") == ["rejected"]
    assert recorder.timeline("r0") == ["queued", "scheduled", "token", "length"]
    assert recorder.earlier[0].timeline[-1] == "abort"
    assert any(a == "preempted" and b == "resumed" for a, b in itertools.pairwise(recorder.timeline("r2")))


@pytest.mark.parametrize("seed", range(12))
def test_the_blocks_of_an_engine_equal_the_fold_after_every_step(seed: int) -> None:
    rng = random.Random(seed)
    recorder = EventRecorder()
    bench = Bench(plugins=[recorder], num_blocks=rng.randint(8, 14), block_size=2, max_num_sequences=3, chunked=bool(seed % 2))
    for _ in range(120):
        if rng.random() < 0.4 and len(bench.scheduler.waiting) < 8:
            bench.add([rng.randrange(1, 4) for _ in range(rng.randint(1, 7))], rng.randint(1, 9))
        if rng.random() < 0.08 and bench.sequences:
            bench.engine.abort(rng.choice(bench.sequences[-4:]).request_id or "")
            recorder.assert_blocks_equal(bench.scheduler.block_manager)
        bench.step()
        recorder.assert_blocks_equal(bench.scheduler.block_manager)
    bench.finish()
    recorder.assert_blocks_equal(bench.scheduler.block_manager)
    recorder.assert_consistent()
    bench.check_tokens()
    ended = {seq.request_id: seq.completion_token_ids for seq in bench.sequences}
    assert {name: request.token_ids for name, request in recorder.requests.items()} == ended


def test_the_log_ends_when_its_last_listener_was_taken_out() -> None:
    bench = Bench(plugins=[make_plugin("bad", blocks_changed=raising(RuntimeError("boom")))])
    pool = bench.scheduler.block_manager
    for prompt in prompts(7):
        bench.add(prompt, 1)
        bench.finish()
        assert not pool.log
    assert bench.report("bad").errors == ("blocks_changed: 5 errors in a row",)
    assert pool.log is None


def test_a_log_goes_on_while_one_listener_is_left() -> None:
    recorder = EventRecorder()
    bench = Bench(plugins=[make_plugin("bad", blocks_changed=raising(RuntimeError("boom"))), recorder])
    for prompt in prompts(9):
        bench.add(prompt, 1)
        bench.finish()
    assert bench.report("bad").errors
    recorder.assert_blocks_equal(bench.scheduler.block_manager)
    assert sum(isinstance(event, BlocksFreed) for event in recorder.block_events) == 9


def test_an_engine_without_a_listener_keeps_no_log() -> None:
    bench = Bench(plugins=[make_plugin(step_started=lambda: None)])
    bench.add([1, 2, 3, 4, 5])
    bench.finish()
    assert bench.scheduler.block_manager.log is None


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["scheduled"], "was not queued first"),
        ([], "was not queued first"),
        (["queued", "token"], "cannot be 'token' after 'queued'"),
        (["queued", "scheduled", "scheduled"], "cannot be 'scheduled' after 'scheduled'"),
        (["queued", "scheduled", "preempted", "token"], "cannot be 'token' after 'preempted'"),
        (["queued", "scheduled", "length", "length"], "cannot be 'length' after 'length'"),
        (["queued", "rejected"], "cannot be 'rejected' after 'queued'"),
        (["queued", "scheduled", "length"], "ended by itself without a token"),
        (["queued", "scheduled", "token"], "has not ended"),
    ],
)
def test_a_life_that_cannot_be_is_noticed(words: list[str], fault: str) -> None:
    recorder = EventRecorder()
    recorder.requests["a"] = RecordedRequest("a", words)
    with pytest.raises(InvariantError, match=f"request 'a' {fault}"):
        recorder.assert_consistent()


def test_tokens_that_nobody_told_are_noticed() -> None:
    recorder = EventRecorder()
    bench = Bench(plugins=[recorder])
    bench.add([1, 2], 2, request_id="a")
    bench.finish()
    recorder.assert_consistent()
    recorder.requests["a"].token_ids.pop()
    with pytest.raises(InvariantError, match="ended with 2 tokens, of which 1 were told"):
        recorder.assert_consistent()


def test_a_virtual_clock_makes_times_exact() -> None:
    clock = VirtualClock(100.0)
    recorder = EventRecorder()
    bench = Bench(plugins=[recorder], clock=clock)
    bench.add([1, 2, 3], 3, request_id="a")
    for seconds in (2.0, 0.5, 0.25):
        clock.advance(seconds)
        bench.step()
    outcome = recorder.requests["a"].outcome
    assert outcome is not None
    assert (outcome.queue_seconds, outcome.prefill_seconds, outcome.decode_seconds) == (2.0, 0.0, 0.75)
    assert outcome.finished_time == 102.75
    assert [plan.state.now for plan in recorder.plans] == [102.0, 102.5, 102.75]
    with pytest.raises(ValueError, match="must not be negative"):
        clock.advance(-1)


def test_a_ticking_clock() -> None:
    clock = VirtualClock(tick=0.5)
    assert [clock(), clock(), clock()] == [0.0, 0.5, 1.0]


def test_a_recorder_on_two_threads_of_an_engine_is_written_by_one() -> None:
    writers: set[str] = set()

    class Watched(EventRecorder):
        def _note(self, hook: str, **arguments: Any) -> None:
            writers.add(threading.current_thread().name)
            super()._note(hook, **arguments)

    llm, _ = scripted_llm(options={"plugins": [Watched()]})
    with llm:
        llm.generate([[1, 2], [3, 4]], PARAMS, use_tqdm=False)
    assert writers == {"minivllm-engine-scripted"}
