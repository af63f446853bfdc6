"""The whole seam at once: policies and observers that answer anything and raise at random, while requests come and go.

After every step the invariants hold and the block events fold into the pool. At the end every token is what its prompt decides,
and every request was told of exactly once.
"""

import random
from collections import Counter
from types import ModuleType
from typing import Any

import pytest
from plugin_bench import VOCABULARY, Bench, make_plugin

from minivllm_plugin.engine.prompt_lookup import PromptLookup
from minivllm_plugin.engine.snapshot import take_snapshot
from minivllm_plugin.errors import RequestRejectedError
from minivllm_plugin.hookspecs import OBSERVER_HOOKS
from minivllm_plugin.testing import EventRecorder, HashedTokens, RepeatingTokens
from minivllm_plugin.views import Admit, Budget, Reject

NUM_WALKS, STEPS = 24, 150


def whim(rng: random.Random, *answers: Any) -> Any:
    """One of ``answers``, called if it can be; now and then an exception."""
    if rng.random() < 0.02:
        raise rng.choice([RuntimeError("whim"), SystemExit(1), ValueError()])
    answer = rng.choice(answers)
    return answer() if callable(answer) else answer


def capricious_policy(name: str, rng: random.Random) -> ModuleType:
    def shuffled(ids: list[Any]) -> list[Any]:
        return rng.sample(ids, rng.randint(0, len(ids)))

    def ids(views: Any) -> Any:
        return whim(
            rng, None, lambda: shuffled([view.request_id for view in views]), lambda: ["stranger", *shuffled(["r1", "r2"])]
        )

    def order_waiting(waiting: Any) -> Any:
        return ids(waiting)

    def select_victims(running: Any) -> Any:
        return ids(running)

    def order_eviction(candidates: Any) -> Any:
        return whim(rng, None, lambda: shuffled([one.block_id for one in candidates]), [-1, 10**9])

    return make_plugin(
        name,
        order_waiting=order_waiting,
        select_victims=select_victims,
        order_eviction=order_eviction,
        step_budget=lambda: whim(rng, None, Budget(1), Budget(3, 1, 1), Budget(0, 0, 0), Budget(100, 100, 100)),
        admit=lambda: whim(rng, None, None, None, Admit(), Reject("a whim", 1.0)),
        cache_salt=lambda: whim(rng, None, "a", "b"),
    )


def capricious_observer(rng: random.Random) -> ModuleType:
    return make_plugin(
        "observer", **{hook.removeprefix("minivllm_"): lambda: whim(rng, None, "ignored") for hook in OBSERVER_HOOKS}
    )


def walk(seed: int, asked: Counter[str]) -> None:
    rng = random.Random(seed)
    guesses = seed % 3 == 0
    chooser = RepeatingTokens(3) if guesses else HashedTokens(VOCABULARY)
    recorder = EventRecorder()
    bench = Bench(
        plugins=[capricious_observer(rng), recorder],
        policies=[capricious_policy(name, rng) for name in ("first", "second", "third")],
        num_blocks=rng.randint(10, 16),
        block_size=2,
        max_num_sequences=rng.randint(1, 4),
        max_num_batched_tokens=rng.choice([8, 16, 64]),
        chunked=bool(seed % 2),
        caching=seed % 5 != 0,
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        choose=chooser,
        can_speculate=guesses,
    )
    if guesses:
        bench.scheduler.speculation = PromptLookup(7)
    rejected = 0
    for _ in range(STEPS):
        if rng.random() < 0.5 and len(bench.scheduler.waiting) < 12:
            prompt = [rng.randrange(1, 4) for _ in range(rng.randint(1, 8))]
            try:
                bench.add(prompt, rng.randint(1, 10), priority=rng.randint(0, 2))
            except RequestRejectedError:
                rejected += 1
        if rng.random() < 0.06 and bench.sequences:
            bench.engine.abort(rng.choice(bench.sequences[-5:]).request_id or "")
        bench.step()
        recorder.assert_blocks_equal(bench.scheduler.block_manager)
    bench.finish(5000)
    bench.check_tokens(chooser)
    recorder.assert_blocks_equal(bench.scheduler.block_manager)
    ended = [arguments["outcome"].reason for hook, arguments in recorder.calls if hook == "request_finished"]
    assert Counter(reason == "rejected" for reason in ended) == Counter({False: len(bench.sequences)}) + Counter({True: rejected})
    assert bench.report("recorder").errors == ()
    recorder.assert_consistent()
    assert [sum(plan.num_tokens) for plan in recorder.plans] == [report.num_batched_tokens for report in recorder.reports]
    assert all(sum(plan.num_tokens) <= plan.budget for plan in recorder.plans)
    for total in bench.plugins.totals():
        asked[total.hook] += total.num_calls
        asked["errors"] += total.num_errors
    asked["rejected"] += rejected
    asked["preempted"] += bench.scheduler.num_preemptions
    asked["guessed"] += take_snapshot(bench.scheduler).num_accepted_tokens


@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_no_company_makes_the_engine_wrong(seed: int) -> None:
    walk(seed, Counter())


def test_the_walks_are_hostile_enough() -> None:
    asked: Counter[str] = Counter()
    for seed in range(12):
        walk(seed, asked)
    for what in (
        "order_waiting",
        "step_budget",
        "select_victims",
        "order_eviction",
        "admit",
        "cache_salt",
        "rejected",
        "preempted",
        "guessed",
    ):
        assert asked[what] > 30, (what, asked)
    assert asked["errors"] > 50
