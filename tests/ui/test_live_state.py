"""The observer's records, folded outside the engine, give the engine's own state: block by block, after every step."""

import random
from collections import Counter

import pytest

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.snapshot import take_snapshot
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.plugins.facade import EngineHandle
from minivllm_plugin.plugins.manager import EnginePlugins
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import LedgerRunner
from minivllm_ui.live_state import LiveState
from minivllm_ui.observer import EngineObserver, EngineStopped
from minivllm_ui.pool_map import CACHED, FREE, HELD, SHARED
from minivllm_ui.request_table import conversation_of, label_of


class Rig:
    """An engine without a thread, an observer on it, and the state that the page would show."""

    def __init__(self, num_blocks: int = 24, block_size: int = 4) -> None:
        self.scheduler = Scheduler(4, 64, num_blocks, block_size, 0, enable_chunked_prefill=True)
        runner = LedgerRunner.for_scheduler(self.scheduler, vocab_size=50)
        self.engine = LLMEngine(self.scheduler, runner, Limits(50, num_blocks * block_size))
        self.observer = EngineObserver()
        self.engine.attach(EnginePlugins(EngineConfig(plugins=(self.observer,), plugin_errors="raise"), Extensions.builtin()))
        self.state = LiveState()
        self.start()

    def start(self) -> None:
        handle = EngineHandle("toy", lambda: take_snapshot(self.scheduler), lambda _: None, list)
        self.observer.minivllm_engine_started(handle)
        self.fold()

    def fold(self) -> None:
        for record in self.observer.take():
            self.state.fold(record)

    def add(self, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.engine.add_prompt(prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), request_id=request_id)

    def step(self) -> None:
        self.engine.step()
        self.fold()

    def run(self) -> None:
        while not self.scheduler.is_finished():
            self.step()

    def kinds(self) -> set[str]:
        return {str(event["kind"]) for event in self.state.story.last(300)}


def assert_same(rig: Rig) -> None:
    pool, shown = rig.scheduler.block_manager, rig.state.pool
    tables = {
        seq.request_id: list(seq.block_table) for seq in (*rig.scheduler.running, *rig.scheduler.waiting) if seq.block_table
    }
    assert shown.tables == tables
    held = Counter(block_id for table in tables.values() for block_id in table)
    expected = [0, 0, 0, 0]
    for block in pool.blocks:
        value = shown.state[block.block_id]
        assert shown.num_holders[block.block_id] == held[block.block_id] == block.ref_count
        kind = SHARED if block.ref_count > 1 else HELD if block.ref_count else FREE if block.key is None else CACHED
        assert min(value, HELD) == kind
        expected[kind] += 1
        if kind == HELD:
            assert value - HELD == rig.state.requests.live[shown.holders(block.block_id)[0]].slot
    assert shown.counts == expected
    for seq in (*rig.scheduler.running, *rig.scheduler.waiting):
        one = rig.state.requests.live[seq.request_id or ""]
        assert (one.num_prompt, one.num_generated) == (seq.num_prompt_tokens, seq.num_completion_tokens)
        assert one.num_computed == seq.num_computed_tokens
        assert one.num_preemptions == seq.num_preemptions
    assert rig.state.requests.num_preemptions == rig.scheduler.num_preemptions
    assert shown.num_evicted == pool.statistics.evicted_blocks


@pytest.mark.parametrize("seed", range(6))
def test_every_step_of_a_busy_engine_is_mirrored(seed: int) -> None:
    rig, chance = Rig(), random.Random(seed)
    starts = [[chance.randrange(1, 50) for _ in range(12)] for _ in range(2)]
    for number in range(60):
        if chance.random() < 0.5:
            prompt = [
                *chance.choice(starts)[: chance.randrange(1, 13)],
                *(chance.randrange(1, 50) for _ in range(chance.randrange(1, 20))),
            ]
            rig.add(f"chat-{number}-1", prompt, chance.randrange(1, 30))
        if chance.random() < 0.1 and rig.state.requests.live:
            rig.engine.abort(chance.choice(list(rig.state.requests.live)))
            rig.fold()
        if chance.random() < 0.03:
            rig.scheduler.block_manager.reset_prefix_cache()
        rig.step()
        assert_same(rig)
    rig.run()
    assert_same(rig)
    assert rig.state.requests.live == {}
    assert {"admitted", "shared", "preempted", "resumed", "evicted", "finished"} <= rig.kinds()


def test_the_story_names_who_shares_with_whom_and_what_stays() -> None:
    rig = Rig(num_blocks=64)
    rig.add("chat-1-1", list(range(1, 18)), 6)
    rig.step()
    rig.add("guest-2-1", [*range(1, 17), 40, 41], 2)
    rig.run()
    lines = [event["text"] for event in rig.state.story.last(100)]
    assert "Chat 1 starts: 17 prompt tokens to compute" in lines
    assert "Guest 2 starts like Chat 1: 4 blocks shared, not computed again" in lines
    assert "Chat 1 is done after 6 tokens: 5 blocks stay reusable" in lines
    rig.add("chat-3-1", [*range(1, 17), 42], 1)
    rig.run()
    assert rig.state.story.last(100)[-2]["text"] == "Chat 3 finds 4 blocks still in the cache and reuses them"
    assert rig.state.requests.hit_rate == (16 + 16) / (17 + 18 + 17)


def test_a_pushed_out_request_keeps_its_colour_and_is_told_of() -> None:
    rig = Rig(num_blocks=8)
    rig.add("chat-1-1", [1, 2, 3], 24)
    rig.add("chat-2-1", [4, 5, 6], 24)
    slots = {}
    while not rig.scheduler.is_finished():
        rig.step()
        for one in rig.state.requests.in_order():
            assert slots.setdefault(one.request_id, one.slot) == one.slot
            if one.state == "preempted":
                assert rig.state.requests.num_ahead(one.request_id) == 0
    lines = " ".join(str(event["text"]) for event in rig.state.story.last(100))
    assert "Pool full: Chat 2 gives up its" in lines
    assert "Chat 2 is back: " in lines
    assert len(set(slots.values())) == 2
    outcome = rig.state.requests.outcomes["chat-2-1"]
    assert outcome.num_preemptions > 0
    assert outcome.num_completion_tokens == 24


def test_an_engine_that_dies_leaves_nothing_behind_and_the_next_starts_empty() -> None:
    rig = Rig()
    rig.add("chat-1-1", [1, 2, 3, 4, 5, 6], 20)
    rig.step()
    rig.state.fold(EngineStopped("RuntimeError: boom"))
    assert (rig.state.status, rig.state.error) == ("dead", "RuntimeError: boom")
    assert rig.state.requests.live == {}
    assert rig.state.pool.counts == [24, 0, 0, 0]
    rig.start()
    assert (rig.state.status, rig.state.generation) == ("serving", 2)


def test_what_a_conversation_left_behind_is_its_own() -> None:
    rig = Rig(num_blocks=64)
    rig.add("chat-7-1", list(range(1, 14)), 1)
    rig.add("chat-8-1", list(range(20, 30)), 1)
    rig.run()
    mine = rig.state.reusable_blocks_of("chat-7")
    assert len(mine) == 3
    assert len(rig.state.reusable_blocks_of("chat-8")) == 2
    details = rig.state.pool.details(mine[0])
    assert details["holders"] == []
    assert details["last_holder"] == "chat-7-1"
    assert len(str(details["hash"])) == 8


def test_names() -> None:
    assert conversation_of("chat-3-12") == "chat-3"
    assert conversation_of("request-4") == "request-4"
    assert label_of("guest-3-1") == "Guest 3"
    assert label_of("x" * 50) == "x" * 24
