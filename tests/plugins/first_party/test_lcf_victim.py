"""``lcf-victim``: whoever loses the least makes room, so less is computed twice."""

import random

from policy_bench import Bench, mixed, view

from minivllm_plugin.plugins.first_party.lcf_victim import LeastComputedVictim


def test_the_fewest_computed_tokens_go_first_then_who_came_last() -> None:
    running = [
        view("much", 3, num_computed_tokens=900),
        view("old", 0, num_computed_tokens=20),
        view("new", 2, num_computed_tokens=20),
        view("needy", 1, num_computed_tokens=50),
    ]
    assert LeastComputedVictim().minivllm_select_victims(running) == ["new", "old", "needy", "much"]


def test_the_one_in_need_may_be_the_victim_itself() -> None:
    """B wants a third block when none is left. The engine would put out the long prompt, which came last and has the most to
    lose."""
    preempted = {}
    for policies in ([], ["lcf-victim"]):
        bench = Bench(policies, mixed(13, enable_prefix_caching=False))
        bench.add([1] * 7, 16, request_id="A")
        bench.add([2] * 6, 16, request_id="B")
        bench.step()
        bench.add([3] * 28, 8, request_id="long")
        while not bench.scheduler.num_preemptions:
            bench.step()
        preempted[len(policies)] = [seq.request_id for seq in bench.sequences if seq.num_preemptions]
        bench.run()
    assert preempted == {0: ["long"], 1: ["B"]}


def test_fewer_tokens_are_computed_twice() -> None:
    """Short and long prompts in a pool that runs out: what is computed beyond what no shortage would cost."""
    wasted = []
    for policies in ([], ["lcf-victim"]):
        rng = random.Random(5)
        bench = Bench(policies, mixed(60, budget=256, max_num_sequences=16, enable_prefix_caching=False), vocab_size=50)
        lengths = [(rng.choice([4, 8, 12, 100]), rng.randint(20, 60)) for _ in range(60)]
        for prompt, completion in lengths:
            bench.add([rng.randrange(50) for _ in range(prompt)], completion)
        bench.run()
        assert all(seq.finish_reason == "length" for seq in bench.sequences)
        wasted.append(bench.num_computed - sum(prompt + completion - 1 for prompt, completion in lengths))
        assert bench.scheduler.num_preemptions > 10
    assert wasted[1] < 0.75 * wasted[0]
