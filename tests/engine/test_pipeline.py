"""Steps that overlap: the same tokens and ends as steps that wait, whatever happens in between, and at most two under way."""

import random
from typing import Any

import pytest
from launching_ledger import LaunchedBatch, LaunchingLedger

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import FAILED_TOKEN, MAX_TOKEN_ID, Sequence
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.plugins.manager import EnginePlugins
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import EventRecorder, HashedTokens, ScriptedTokens, assert_invariants

VOCABULARY, EOS = 30, 0
LIMITS = Limits(1 << 20, 1000)


def make_engine(scheduler: Scheduler, choose: Any = None) -> tuple[LLMEngine, LaunchingLedger]:
    runner = LaunchingLedger.for_scheduler(scheduler, choose=choose or HashedTokens(VOCABULARY))
    return LLMEngine(scheduler, runner, LIMITS, asynchronous=True), runner


def finish(engine: LLMEngine) -> list[Any]:
    records = []
    for _ in range(2000):
        if engine.scheduler.is_finished():
            return records
        records += engine.step().progress
        assert_invariants(engine.scheduler, [])
    raise AssertionError("it does not end")


class Walk:
    """A random caller, and a runner that may be asked for the next batch before it has told of this one."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.num_blocks, block_size = rng.randint(2, 14), rng.choice([1, 2, 4, 8])
        self.budget = rng.choice([1, 2, 5, 13, 64])
        self.chunked = seed % 2 == 1
        self.scheduler = Scheduler(
            rng.randint(1, 5),
            self.budget,
            self.num_blocks,
            block_size,
            EOS,
            enable_chunked_prefill=self.chunked,
            enable_prefix_caching=rng.random() < 0.8,
            policy=rng.choice(["fcfs", "priority"]),
        )
        self.hashed = HashedTokens(VOCABULARY)
        self.failing: set[str] = set()
        self.engine, self.runner = make_engine(self.scheduler, self.choose)
        self.capacity = self.num_blocks * block_size
        self.accepted: list[Sequence] = []
        self.ends: dict[str, list[str]] = {}
        self.tokens: dict[str, list[int]] = {}

    def choose(self, seq: Sequence) -> int:
        return FAILED_TOKEN if seq.request_id in self.failing and seq.num_completion_tokens == 2 else self.hashed(seq)

    def add(self) -> None:
        rng = self.rng
        name = f"{'host' if rng.random() < 0.1 else 'r'}-{len(self.accepted)}"
        limit = self.capacity if self.chunked else min(self.capacity, self.budget)
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, min(9, limit)))]
        params = SamplingParams(max_tokens=rng.choice([1, 2, 8, 20]), ignore_eos=rng.random() < 0.5)
        if rng.random() < 0.1:
            self.failing.add(name)
        self.accepted.append(self.engine.add_prompt(prompt, params, request_id=name, priority=rng.randint(-1, 1)))

    def abort(self) -> None:
        seq = self.rng.choice(self.accepted)
        if self.engine.abort(seq.request_id or "") is not None:
            self.ends.setdefault(seq.request_id or "", []).append("abort")

    def step(self) -> None:
        for entry in self.engine.step().progress:
            if entry.token_id is not None:
                self.tokens.setdefault(entry.request_id, []).append(entry.token_id)
            if entry.finish_reason is not None:
                self.ends.setdefault(entry.request_id, []).append(entry.finish_reason)
        assert_invariants(self.scheduler, self.accepted)
        assert all(seq.num_pending_tokens <= 1 for seq in self.scheduler.running)

    def run(self) -> None:
        for _ in range(120):
            if self.rng.random() < 0.4:
                self.add()
            if self.accepted and self.rng.random() < 0.08:
                self.abort()
            self.step()
        while not self.scheduler.is_finished():
            self.step()
        self.step()  # what was launched for nothing


@pytest.mark.parametrize("seed", range(60))
def test_walk(seed: int) -> None:
    walk = Walk(seed)
    walk.run()
    assert walk.scheduler.block_manager.num_free_blocks == walk.num_blocks
    assert walk.runner.num_launched == walk.runner.num_waited
    assert walk.runner.most_under_way <= 2
    for seq in walk.accepted:
        name = seq.request_id or ""
        assert len(walk.ends[name]) == 1
        assert walk.tokens.get(name, []) == seq.completion_token_ids
        assert seq.completion_token_ids == walk.hashed.continue_prompt(seq.prompt_token_ids, seq.num_completion_tokens)
        if walk.ends[name] == ["length"] and seq.num_tokens <= walk.capacity:
            assert seq.num_completion_tokens == seq.max_tokens


def test_the_walks_overlap_preempt_and_fail() -> None:
    overlaps = preemptions = 0
    reasons: set[str] = set()
    for seed in range(12):
        walk = Walk(seed)
        walk.run()
        overlaps += walk.runner.num_overlaps
        preemptions += walk.scheduler.num_preemptions
        reasons |= {ends[0] for ends in walk.ends.values()}
    assert overlaps > 300
    assert preemptions > 10
    assert reasons == {"stop", "length", "abort", "error"}


def test_a_decoding_batch_is_launched_before_the_one_before_it_is_waited_for() -> None:
    engine, runner = make_engine(Scheduler(4, 64, 32, 4, EOS, enable_chunked_prefill=True), lambda seq: 5)
    for index in range(3):
        engine.add_prompt([7, 8, 9], SamplingParams(max_tokens=10), request_id=f"r{index}")
    outputs = []
    while not engine.scheduler.is_finished():
        outputs.append(engine.step())
    assert [len(output.progress) for output in outputs] == [3] * 10
    assert (runner.num_launched, runner.num_overlaps) == (10, 9)  # its length is known: nothing is launched for nothing


def test_an_end_that_nobody_could_know_costs_one_row() -> None:
    engine, runner = make_engine(
        Scheduler(4, 64, 32, 4, EOS, enable_chunked_prefill=True), ScriptedTokens({"a": [5, 6, EOS]}, lambda seq: 7)
    )
    engine.add_prompt([7, 8, 9], SamplingParams(max_tokens=10), request_id="a")
    engine.add_prompt([7, 8, 4], SamplingParams(max_tokens=6), request_id="b")
    records = finish(engine)
    assert [entry.token_id for entry in records if entry.request_id == "a"] == [5, 6, EOS]
    assert [entry.token_id for entry in records if entry.request_id == "b"] == [7] * 6
    assert sum("a" in batch.request_ids for batch in runner.batches) == 4


@pytest.mark.parametrize("ending", [{"max_tokens": 4}, {"max_model_length": 7}])
def test_nothing_is_computed_beyond_an_end_that_is_known(ending: dict[str, int]) -> None:
    """A row beyond the window would read rotary positions and blocks that do not exist."""
    engine, runner = make_engine(Scheduler(4, 64, 2, 4, EOS, enable_chunked_prefill=True), lambda seq: 5)
    engine.add_prompt([7, 8, 9], SamplingParams(**{"max_tokens": 100, **ending}), request_id="a")
    assert len(finish(engine)) == 4
    assert max(row.num_computed + row.num_scheduled for batch in runner.batches for row in batch.rows) == 6


def test_a_pool_that_is_full_ends_its_only_sequence() -> None:
    engine, _ = make_engine(Scheduler(4, 64, 2, 4, EOS, enable_chunked_prefill=True), lambda seq: 5)
    sequence = engine.add_prompt([7, 8, 9], SamplingParams(max_tokens=100), request_id="a")
    finish(engine)
    assert (sequence.finish_reason, sequence.num_tokens) == ("length", 9)


def test_a_batch_that_needs_the_hosts_history_waits_for_it() -> None:
    engine, runner = make_engine(Scheduler(4, 64, 32, 4, EOS, enable_chunked_prefill=True), lambda seq: 5)
    engine.add_prompt([7, 8, 9], SamplingParams(max_tokens=5), request_id="host")
    engine.add_prompt([7, 8, 9], SamplingParams(max_tokens=12), request_id="free")
    finish(engine)
    assert runner.num_launched == 12
    assert 0 < runner.num_overlaps < 11  # from where it is alone on


def test_observers_hear_of_one_step_after_the_other() -> None:
    recorder = EventRecorder()
    engine, runner = make_engine(Scheduler(4, 64, 32, 4, EOS, enable_chunked_prefill=True))
    engine.attach(EnginePlugins(EngineConfig(plugins=(recorder,)), Extensions.builtin(), judges_speed=False))
    for index in range(3):
        engine.add_prompt([7, 8, 9], SamplingParams(max_tokens=4, ignore_eos=True), request_id=f"r{index}")
    finish(engine)
    assert runner.num_overlaps == 3
    steps = [name for name in recorder.hooks() if name.startswith("step_")]
    assert steps == ["step_started", "step_finished"] * 4
    assert [plan.num_tokens for plan in recorder.plans] == [(3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1)]
    recorder.assert_consistent()


@pytest.mark.parametrize("seed", [5, 8, 27, 44, 72, 84, 90, 91])
def test_observers_hear_of_nobody_after_the_end(seed: int) -> None:
    """What was scheduled ahead is told later: by then some of it has been aborted, or has ended and is not computed."""
    recorder, walk = EventRecorder(), Walk(seed)
    walk.engine.attach(EnginePlugins(EngineConfig(plugins=(recorder,)), Extensions.builtin(), judges_speed=False))
    walk.run()
    recorder.assert_consistent()
    recorder.assert_blocks_equal(walk.scheduler.block_manager)
    computed = [(sum(plan.num_tokens), set(plan.request_ids)) for plan in recorder.plans]
    assert [num_tokens for num_tokens, _ in computed] == [report.num_batched_tokens for report in recorder.reports]
    assert all(set(report.request_ids) <= ids for report, (_, ids) in zip(recorder.reports, computed, strict=True))
    for seq in walk.accepted:
        told = recorder.requests[seq.request_id or ""]
        assert told.token_ids == seq.completion_token_ids
        assert told.timeline.count("preempted") == seq.num_preemptions or seq.finish_reason == "abort"


def test_a_runner_that_fails_at_launch_or_later_is_not_hidden() -> None:
    scheduler = Scheduler(4, 64, 32, 4, EOS, enable_chunked_prefill=True)
    runner = LaunchingLedger.for_scheduler(scheduler, fail_on_call=3)
    engine = LLMEngine(scheduler, runner, LIMITS, asynchronous=True)
    engine.add_prompt([7, 8, 9], SamplingParams(max_tokens=9, ignore_eos=True))
    with pytest.raises(RuntimeError, match="call 3 fails on purpose"):
        finish(engine)


@pytest.mark.parametrize("call", [1, 2, 3])
def test_the_plan_of_a_launch_that_fails_is_told(call: int) -> None:
    """The second and the third are launched in the midst of the step before them."""
    scheduler = Scheduler(4, 64, 32, 4, EOS, enable_chunked_prefill=True)
    engine = LLMEngine(scheduler, LaunchingLedger.for_scheduler(scheduler, fail_on_call=call), LIMITS, asynchronous=True)
    recorder = EventRecorder()
    plugins = EnginePlugins(EngineConfig(plugins=(recorder,)), Extensions.builtin(), judges_speed=False)
    engine.attach(plugins)
    engine.add_prompt([7, 8, 9], SamplingParams(max_tokens=9, ignore_eos=True), request_id="a")
    with pytest.raises(RuntimeError) as failure:
        finish(engine)
    plugins.failed(failure.value)
    [plan] = [arguments["plan"] for hook, arguments in recorder.calls if hook == "engine_error"]
    assert plan.num_tokens == ((3,) if call == 1 else (1,))
    assert plan.state.step == call


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("answers", [[-3], [MAX_TOKEN_ID + 1], [], [5, 5], [[]], [[5, 5]]])
def test_answers_that_are_none_are_refused_in_steps_of_either_kind(
    answers: Any, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = Scheduler(4, 64, 32, 4, EOS, enable_chunked_prefill=True)
    runner: Any = LaunchingLedger.for_scheduler(scheduler)
    engine = LLMEngine(scheduler, runner, LIMITS, asynchronous=asynchronous)
    owner, name = (LaunchedBatch, "wait") if asynchronous else (LaunchingLedger, "run")
    usual = getattr(owner, name)
    calls = iter(range(10))
    monkeypatch.setattr(owner, name, lambda *given: answers if next(calls) == 2 else usual(*given))
    seq = engine.add_prompt([7, 8, 9], SamplingParams(max_tokens=9, ignore_eos=True), request_id="a")
    with pytest.raises(ValueError, match=r"the runner returned|1 sequences but"):
        finish(engine)
    assert seq.num_completion_tokens == 2
    engine.abort("a")
    scheduler.check_integrity()
