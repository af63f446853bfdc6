"""Policies at their worst: random, hostile or broken answers to every question, and no promise of the engine is broken.

The walks drive a scheduler with a policy object of their own. After every call both integrity checks run and the ledger verifies
each read and write; at the end the tokens are those that every prompt decides alone, and everybody has ended.
"""

import logging
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence as EngineSequence
from minivllm_plugin.engine.steering import MAX_CHOSEN, MAX_OVERTAKEN, WAITING_WINDOW, Steering
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import HashedTokens, LedgerRunner, assert_invariants
from minivllm_plugin.views import Budget, CandidateBlock, EngineState, RequestView

NUM_WALKS, STEPS = 60, 150
VOCABULARY = 30
EVERYTHING = ("order_waiting", "step_budget", "select_victims", "order_eviction")
Answer = Callable[..., Any]


class ScriptedPolicies:
    """Who answers: one function a decision; what a check refuses leaves the decision to the engine."""

    def __init__(self, **answers: Answer) -> None:
        self.by_decision = answers
        self.asked: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()

    def answers(self, decision: str) -> bool:
        return decision in self.by_decision

    def ask(self, decision: str, check: Callable[[Any], Any], **arguments: Any) -> Any:
        self.asked[decision] += 1
        try:
            answer = self.by_decision[decision](**arguments)
            return None if answer is None else check(answer)
        except (TypeError, ValueError, ZeroDivisionError):
            self.refused[decision] += 1
            return None

    def name_of(self, decision: str) -> str:
        return "scripted"

    def waiting_window(self) -> int:
        return 0


def steer(scheduler: Scheduler, policies: ScriptedPolicies) -> Steering:
    steering = Steering(policies, lambda: 0.0)
    scheduler.steer(steering)
    return steering


# --- hostile characters -----------------------------------------------------------------------------------------------


def ids_of(views: Sequence[RequestView]) -> list[str]:
    return [view.request_id for view in views]


class Random:
    """Any answer at all: orders, parts of orders, strangers, repetitions, nonsense, nothing, an exception."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def spoil(self, ids: list[Any], stranger: Any) -> Any:
        rng = self.rng
        rng.shuffle(ids)
        kind = rng.randrange(9)
        if kind == 0:
            return None
        if kind == 1:
            return [None, *ids]
        if kind == 2:
            return "nonsense"
        if kind == 3:
            return 1 / 0
        if kind == 4:
            return ids[: rng.randint(0, len(ids))]
        if kind == 5:
            return [stranger, *ids, *ids]
        return iter(ids)

    def order_waiting(self, waiting: Sequence[RequestView], state: EngineState) -> Any:
        return self.spoil(ids_of(waiting), "stranger")

    def select_victims(self, running: Sequence[RequestView], blocks_needed: int, state: EngineState) -> Any:
        return self.spoil(ids_of(running), "stranger")

    def order_eviction(self, candidates: Sequence[CandidateBlock], num_needed: int, state: EngineState) -> Any:
        return self.spoil([candidate.block_id for candidate in candidates], 10**9)

    def step_budget(self, state: EngineState) -> Any:
        def number() -> Any:
            return self.rng.choice([None, -3, 0, 1, 2, 5, 1000, 0.5, True])

        return self.rng.choice([None, 7, Budget(), Budget(number(), number(), number())])


class Hostile:
    """As unfair as the interface allows: newest first, oldest out, tiny budgets, roots of chains evicted first."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def order_waiting(self, waiting: Sequence[RequestView], state: EngineState) -> Any:
        return ids_of(sorted(waiting, key=lambda view: -view.arrival))

    def select_victims(self, running: Sequence[RequestView], blocks_needed: int, state: EngineState) -> Any:
        return ids_of(sorted(running, key=lambda view: view.arrival))

    def order_eviction(self, candidates: Sequence[CandidateBlock], num_needed: int, state: EngineState) -> Any:
        return [candidate.block_id for candidate in sorted(candidates, key=lambda one: (one.depth, -one.num_hits))]

    def step_budget(self, state: EngineState) -> Any:
        return Budget(self.rng.choice([0, 1, 2, 100]), self.rng.choice([0, 1, 3]), self.rng.choice([0, 1, 2]))


class Everyone(Hostile):
    """Puts out all it is offered, the needy one included."""

    def select_victims(self, running: Sequence[RequestView], blocks_needed: int, state: EngineState) -> Any:
        return ids_of(running)

    def step_budget(self, state: EngineState) -> Any:
        return None


CHARACTERS = {"random": Random, "hostile": Hostile, "everyone": Everyone}


class Walk:
    """One scheduler with policies, one ledger, and callers who come and go."""

    def __init__(self, seed: int, character: str) -> None:
        self.rng = rng = random.Random(f"{character} {seed}")
        self.block_size = rng.choice([1, 2, 4])
        self.num_blocks = rng.randint(2, 14)
        self.budget = rng.choice([2, 3, 5, 16, 64])
        self.scheduler = Scheduler(
            rng.randint(1, 5),
            self.budget,
            self.num_blocks,
            self.block_size,
            0,
            enable_chunked_prefill=seed % 2 == 1,
            enable_prefix_caching=rng.random() < 0.8,
            policy=rng.choice(["fcfs", "fcfs", "priority"]),
        )
        one = CHARACTERS[character](rng)
        self.policies = ScriptedPolicies(**{name: getattr(one, name) for name in EVERYTHING if rng.random() < 0.85})
        steer(self.scheduler, self.policies)
        self.hashed = HashedTokens(VOCABULARY)
        self.runner = LedgerRunner.for_scheduler(self.scheduler, choose=self.hashed)
        self.prefixes = [[rng.randrange(VOCABULARY) for _ in range(3 * self.block_size)] for _ in range(3)]
        self.accepted: list[EngineSequence] = []
        preempt = self.scheduler.preempt

        def watched(seq: EngineSequence) -> None:
            assert not seq.num_scheduled_tokens, f"{seq!r} is in the batch and is put out"
            preempt(seq)

        self.scheduler.preempt = watched  # type: ignore[method-assign]

    def add(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.prefixes)[: rng.randint(0, 12)] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 5))]
        most = self.num_blocks * self.block_size
        prompt = prompt[: most if self.scheduler.enable_chunked_prefill else min(most, self.budget)]
        params = SamplingParams(max_tokens=rng.choice([1, 3, 8, 20]), ignore_eos=rng.random() < 0.6)
        seq = EngineSequence(prompt, sampling_params=params, priority=rng.randint(0, 2), cache_salt=rng.choice([None, None, "a"]))
        self.scheduler.add_sequence(seq)
        self.accepted.append(seq)

    def step(self) -> None:
        batch, is_prefill = self.scheduler.schedule()
        assert_invariants(self.scheduler, self.accepted)
        assert bool(batch) != self.scheduler.is_finished(), "work, but no batch"
        if not batch:
            return
        if self.rng.random() < 0.05:
            self.scheduler.abort(self.rng.choice(batch).request_id or "")
        self.scheduler.postprocess(
            batch, self.runner.run(batch, is_prefill) if any(not seq.is_finished for seq in batch) else [0] * len(batch)
        )
        assert_invariants(self.scheduler, self.accepted)

    def run(self) -> None:
        for _ in range(STEPS):
            while self.rng.random() < 0.35 and len(self.scheduler.waiting) < 40:
                self.add()
            if self.accepted and self.rng.random() < 0.02:
                self.scheduler.abort(self.rng.choice(self.accepted[-8:]).request_id or "")
            if self.rng.random() < 0.01:
                self.scheduler.block_manager.reset_prefix_cache()
            self.step()

    def drain(self) -> None:
        for _ in range(20_000):
            if self.scheduler.is_finished():
                return
            self.step()
        pytest.fail(f"not drained: {self.scheduler.waiting} {self.scheduler.running}")


@pytest.mark.parametrize("character", CHARACTERS)
@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_no_policy_makes_the_engine_wrong(seed: int, character: str) -> None:
    walk = Walk(seed, character)
    walk.run()
    walk.drain()
    pool = walk.scheduler.block_manager
    assert pool.num_free_blocks == pool.num_blocks
    for seq in walk.accepted:
        assert seq.finish_reason in ("stop", "length", "abort")
        assert seq.completion_token_ids == walk.hashed.continue_prompt(seq.prompt_token_ids, seq.num_completion_tokens)


def test_the_walks_ask_everything_often_enough() -> None:
    asked: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    preemptions = evictions = 0
    for seed in range(12):
        for character in CHARACTERS:
            walk = Walk(seed, character)
            walk.run()
            walk.drain()
            asked += walk.policies.asked
            refused += walk.policies.refused
            preemptions += walk.scheduler.num_preemptions
            evictions += walk.scheduler.block_manager.statistics.evicted_blocks
    assert min(asked[name] for name in EVERYTHING) > 200, asked
    assert min(refused[name] for name in EVERYTHING) > 20, refused
    assert preemptions > 300
    assert evictions > 1000


# --- nobody starves ---------------------------------------------------------------------------------------------------


class Crowd:
    """A scheduler that is never empty: as many newcomers as it takes to keep others waiting, and one request that is watched."""

    def __init__(
        self, policies: ScriptedPolicies, *, chunked: bool, num_blocks: int, budget: int, scheduling: Any = "fcfs"
    ) -> None:
        self.scheduler = Scheduler(
            3, budget, num_blocks, 4, 0, enable_chunked_prefill=chunked, enable_prefix_caching=False, policy=scheduling
        )
        steer(self.scheduler, policies)
        self.runner = LedgerRunner.for_scheduler(self.scheduler)
        self.number = 0

    def add(self, length: int, max_tokens: int, priority: int = 0) -> EngineSequence:
        self.number += 1
        tokens = [(self.number * 7 + position) % 900 + 1 for position in range(length)]
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        seq = EngineSequence(tokens, sampling_params=params, priority=priority)
        self.scheduler.add_sequence(seq)
        return seq

    def step(self) -> list[EngineSequence]:
        while len(self.scheduler.waiting) < 6:
            self.add(self.number % 5 + 3, self.number % 7 + 4)
        batch, is_prefill = self.scheduler.schedule()
        assert batch
        self.scheduler.postprocess(batch, self.runner.run(batch, is_prefill))
        return self.scheduler.admitted


def newest_first(waiting: Sequence[RequestView], state: EngineState) -> list[str]:
    return ids_of(sorted(waiting, key=lambda view: -view.arrival))


def oldest_out(running: Sequence[RequestView], blocks_needed: int, state: EngineState) -> list[str]:
    return ids_of(sorted(running, key=lambda view: view.arrival))


@pytest.mark.parametrize("scheduling", ["fcfs", "priority"])
@pytest.mark.parametrize("chunked", [False, True])
def test_the_oldest_is_overtaken_in_at_most_64_steps(chunked: bool, scheduling: str, caplog: pytest.LogCaptureFixture) -> None:
    crowd = Crowd(ScriptedPolicies(order_waiting=newest_first), chunked=chunked, num_blocks=40, budget=32, scheduling=scheduling)
    for _ in range(4):
        crowd.step()
    watched = crowd.add(5, 5)
    others = [seq for seq in crowd.scheduler.waiting if seq is not watched]
    for seq in others:  # so that the watched one is the oldest that waits
        crowd.scheduler.abort(seq.request_id or "")
    overtaken = 0
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            admitted = crowd.step()
            if watched in admitted:
                break
            overtaken += bool(admitted)
        assert watched in admitted
        assert overtaken == MAX_OVERTAKEN
        for _ in range(400):
            crowd.step()
    assert watched.finish_reason == "length"
    assert caplog.text.count("be overtaken in 64 steps; it goes first now (said once)") == 1


@pytest.mark.parametrize("chunked", [False, True])
def test_who_was_overtaken_enough_goes_first_also_after_a_preemption(chunked: bool) -> None:
    crowd = Crowd(ScriptedPolicies(order_waiting=newest_first), chunked=chunked, num_blocks=40, budget=32)
    watched = crowd.add(5, 60)
    watched.num_overtaken = MAX_OVERTAKEN
    for _ in range(5):
        crowd.step()
        assert watched in crowd.scheduler.running
        crowd.scheduler.preempt(watched)
    assert watched.num_preemptions == 5
    assert watched.num_completion_tokens >= 5


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("budget", [None, 1])
def test_nobody_starves_under_hostile_order_and_victims_though_others_keep_coming(chunked: bool, budget: int | None) -> None:
    answers: dict[str, Answer] = {"order_waiting": newest_first, "select_victims": oldest_out}
    if budget is not None:
        answers["step_budget"] = lambda state: Budget(budget, budget, 2)
    crowd = Crowd(ScriptedPolicies(**answers), chunked=chunked, num_blocks=6, budget=16)
    for _ in range(3):
        crowd.step()
    watched = crowd.add(10, 8)
    for _ in range(12_000):
        if watched.is_finished:
            break
        crowd.step()
    assert watched.finish_reason == "length"


def test_a_policy_can_put_a_request_out_only_so_often() -> None:
    policies = ScriptedPolicies(select_victims=oldest_out)
    crowd = Crowd(policies, chunked=True, num_blocks=6, budget=16)
    watched = crowd.add(6, 17)
    chosen = 0
    victims = Steering.victims

    def counted(self: Steering, *arguments: Any) -> list[EngineSequence]:
        nonlocal chosen
        found = victims(self, *arguments)
        assert all(seq.num_preemptions < MAX_CHOSEN for seq in found)
        chosen += watched in found
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Steering, "victims", counted)
        for _ in range(3000):
            if watched.is_finished:
                break
            crowd.step()
    assert watched.finish_reason == "length"
    assert 0 < chosen <= MAX_CHOSEN


# --- the questions, one by one -------------------------------------------------------------------------------------------


def test_the_order_that_a_policy_left_is_undone_once_it_is_out() -> None:
    for scheduling, expected in (("fcfs", ["a", "b", "c", "d"]), ("priority", ["d", "b", "c", "a"])):
        policies = ScriptedPolicies(order_waiting=newest_first, step_budget=lambda state: Budget(num_sequences=1))
        scheduler = Scheduler(1, 16, 16, 4, 0, enable_chunked_prefill=True, policy=scheduling)  # type: ignore[arg-type]
        steer(scheduler, policies)
        for name, priority in zip("xabcd", (0, 3, 1, 1, 0), strict=True):
            params = SamplingParams(max_tokens=3, ignore_eos=True)
            scheduler.add_sequence(EngineSequence([1, 2, 3], sampling_params=params, request_id=name, priority=priority))
        runner = LedgerRunner.for_scheduler(scheduler)
        batch, is_prefill = scheduler.schedule()
        scheduler.postprocess(batch, runner.run(batch, is_prefill))
        del policies.by_decision["order_waiting"]
        left = [seq.request_id for seq in scheduler.waiting]
        assert left != sorted(left, key=lambda name: [*expected, "x"].index(name or ""))
        while scheduler.running:
            batch, is_prefill = scheduler.schedule()
            scheduler.postprocess(batch, runner.run(batch, is_prefill))
        scheduler.schedule()
        rest = [seq.request_id for seq in (*scheduler.running, *scheduler.waiting)]
        assert rest == [name for name in ["x", *expected] if name in rest]


def test_only_the_front_of_a_long_queue_is_shown() -> None:
    shown: list[int] = []

    def order(waiting: Sequence[RequestView], state: EngineState) -> list[str]:
        shown.append(len(waiting))
        assert state.num_waiting == 100
        return ids_of(waiting)[::-1]

    scheduler = Scheduler(1, 16, 16, 4, 0, enable_chunked_prefill=True)
    steer(scheduler, ScriptedPolicies(order_waiting=order))
    for number in range(100):
        scheduler.add_sequence(EngineSequence([1, 2], request_id=str(number)))
    batch, _ = scheduler.schedule()
    assert shown == [WAITING_WINDOW]
    assert [seq.request_id for seq in batch] == [str(WAITING_WINDOW - 1)]
    assert [seq.request_id for seq in scheduler.waiting][-36:] == [str(number) for number in range(64, 100)]


def test_views_hold_what_the_cache_knows_of_a_waiting_request() -> None:
    shown: list[Sequence[RequestView]] = []
    scheduler = Scheduler(2, 64, 16, 4, 0, enable_chunked_prefill=True)
    steer(scheduler, ScriptedPolicies(order_waiting=lambda waiting, state: shown.append(waiting)))
    runner = LedgerRunner.for_scheduler(scheduler)

    def run(*prompts: list[int]) -> None:
        for prompt in prompts:
            scheduler.add_sequence(EngineSequence(prompt, sampling_params=SamplingParams(max_tokens=1)))
        while not scheduler.is_finished():
            batch, is_prefill = scheduler.schedule()
            scheduler.postprocess(batch, runner.run(batch, is_prefill))

    run([1, 2, 3, 4, 5, 6, 7, 8, 9])
    run([1, 2, 3, 4, 5, 6, 7, 8, 7], [1, 2, 3, 4, 7, 7, 7, 7, 7], [2, 2, 3])
    assert [[view.num_cached_tokens for view in views] for views in shown] == [[8, 4, 0]]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (Budget(), (8, 8, 4)),
        (Budget(3, 2, 1), (3, 2, 1)),
        (Budget(-1, 0, -7), (1, 1, 1)),
        (Budget(10**30, 10**30, 10**30), (8, 8, 4)),
        (Budget(None, 3, None), (8, 3, 4)),
    ],
)
def test_budgets_are_clamped(asked: Budget, expected: tuple[int, int, int]) -> None:
    scheduler = Scheduler(4, 8, 16, 4, 0, enable_chunked_prefill=True)
    steering = steer(scheduler, ScriptedPolicies(step_budget=lambda state: asked))
    assert steering.limits(scheduler, scheduler._own_limits()) == expected


def test_the_classic_mode_takes_only_the_number_of_sequences_from_a_budget() -> None:
    scheduler = Scheduler(4, 32, 16, 4, 0)
    steer(scheduler, ScriptedPolicies(step_budget=lambda state: Budget(1, 1, 2)))
    for number in range(3):
        scheduler.add_sequence(EngineSequence([1, 2, 3, 4, 5], request_id=str(number)))
    batch, _ = scheduler.schedule()
    assert [(seq.request_id, seq.num_scheduled_tokens) for seq in batch] == [("0", 5), ("1", 5)]
    assert scheduler.step_budget == 32


def test_taking_the_policies_away_leaves_the_engine_as_it_was() -> None:
    policies = ScriptedPolicies(**{name: getattr(Hostile(random.Random(0)), name) for name in EVERYTHING})
    scheduler = Scheduler(2, 16, 6, 4, 0, enable_chunked_prefill=True)
    steer(scheduler, policies)
    scheduler.steer(None)
    for number in range(4):
        scheduler.add_sequence(EngineSequence([1, 2, 3], request_id=str(number)))
    batch, _ = scheduler.schedule()
    assert [seq.request_id for seq in batch] == ["0", "1"]
    assert policies.asked == Counter()
