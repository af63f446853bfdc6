"""``lpm``: the longest cached prefix first, waiting counts, too long a queue goes by arrival; more is found in the cache."""

import pytest
from policy_bench import Bench, mixed, state, view

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.plugins.first_party.lpm import LongestPrefixMatch
from minivllm_plugin.simulation import generate_trace, simulate


def test_the_longest_cached_prefix_goes_first() -> None:
    waiting = [
        view("none", 0, arrival_time=0.0),
        view("half", 1, num_cached_tokens=64, arrival_time=0.0),
        view("most", 2, num_cached_tokens=96, arrival_time=0.0),
        view("none either", 3, arrival_time=0.0),
    ]
    assert LongestPrefixMatch().minivllm_order_waiting(waiting, state()) == ["most", "half", "none", "none either"]


def test_those_without_a_prefix_have_their_turn() -> None:
    """A second counts as 50 cached tokens: 100 of them overtake whoever came at most two seconds before."""
    policy = LongestPrefixMatch(ageing=50.0)
    without = view("without", 0, arrival_time=0.0)
    for gap, order in ((1.9, ["with", "without"]), (2.1, ["without", "with"])):
        found = view("with", 1, num_cached_tokens=100, arrival_time=gap)
        assert policy.minivllm_order_waiting([without, found], state(gap)) == order
        strict = LongestPrefixMatch(ageing=0).minivllm_order_waiting([without, found], state(gap))
        assert strict == ["with", "without"]


def test_a_queue_that_is_too_long_goes_by_arrival() -> None:
    waiting = [view("b", 1, num_cached_tokens=64), view("a", 0)]
    policy = LongestPrefixMatch(longest_queue=128, ageing=0)
    assert policy.minivllm_order_waiting(waiting, state(num_waiting=128)) == ["b", "a"]
    assert policy.minivllm_order_waiting(waiting, state(num_waiting=129)) == ["a", "b"]


def test_it_uses_a_prefix_while_it_is_there() -> None:
    """Two families of prompts by turns, and a pool that holds one prefix beside a running request."""
    num_computed = []
    for policies in ([], [LongestPrefixMatch(ageing=0)]):
        bench = Bench(policies, mixed(8, max_num_sequences=1))
        prefixes = [[family] * 16 for family in (1, 2)]
        for number in range(10):
            bench.add([*prefixes[number % 2], 100 + number], 2)
        bench.run()
        num_computed.append(bench.num_computed)
    assert num_computed[1] == 2 * (18 + 4 * 2)  # each family's prefix is computed once: 17 tokens and one, then one and one
    assert num_computed[0] > 1.5 * num_computed[1]


def test_the_hit_rate_goes_up() -> None:
    """12 prefixes of 64 blocks and a pool for three of them beside what runs."""
    trace = generate_trace(
        300,
        rate=20,
        shared_prefix_tokens=1024,
        num_prefixes=12,
        prompt_tokens="uniform:50:200",
        output_tokens="uniform:20:60",
        seed=3,
    )
    first_come = simulate(trace, num_blocks=400, max_num_sequences=8)
    longest = simulate(trace, ["lpm"], num_blocks=400, max_num_sequences=8)
    assert longest.num_finished == first_come.num_finished == 300
    assert longest.token_hit_rate > 1.5 * first_come.token_hit_rate
    assert longest.ttft.mean < first_come.ttft.mean


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ageing": -0.1}, "ageing must be a number, at least 0, got -0.1"),
        ({"ageing": float("inf")}, "ageing must be a number"),
        ({"longest_queue": -1}, "longest_queue must be an integer of at least 0, got -1"),
        ({"longest_queue": True}, "longest_queue must be an integer"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LongestPrefixMatch(**arguments)  # type: ignore[arg-type]  # wrong on purpose
