"""``slru``: blocks that were found again outlive those that were not, up to a share."""

import pytest
from policy_bench import Bench, block, mixed

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.plugins.first_party.slru import SegmentedLRU

OLDEST_FIRST = [block(1, 5, 9), block(2, 0, 8), block(3, 1, 7), block(4, 0, 6), block(5, 2, 5)]


@pytest.mark.parametrize(
    ("arguments", "order"),
    [
        ({}, [2, 4, 1, 3, 5]),
        ({"protected_hits": 2}, [2, 3, 4, 1, 5]),
        ({"protected_share": 1.0}, [2, 4, 1, 3, 5]),
        ({"protected_share": 0.4}, [1, 2, 4, 3, 5]),  # two of five: the oldest of three is on probation again
        ({"protected_share": 0.0}, [1, 2, 3, 4, 5]),  # plain LRU
    ],
)
def test_probation_first_and_the_oldest_of_each(arguments: dict[str, float], order: list[int]) -> None:
    assert SegmentedLRU(**arguments).minivllm_order_eviction(OLDEST_FIRST) == order  # type: ignore[arg-type]  # floats and ints


def test_a_hot_prefix_survives_a_scan() -> None:
    """A prefix of 4 blocks, found once, then 30 prompts that fill the pool of 24 blocks several times over."""
    found = []
    for policies in ([], ["slru"]):
        bench = Bench(policies, mixed(24, max_num_sequences=2))
        prefix = list(range(16))
        for last in (900, 901):
            bench.add([*prefix, last], 1)
            bench.run()
        for number in range(30):
            bench.add([500 + number] * 20, 4)
            bench.run()
        again = bench.add([*prefix, 902], 1)
        bench.run()
        found.append(again.prompt_cached_tokens)
    assert found == [0, 16]


def test_what_was_hot_leaves_in_the_end() -> None:
    """Old favourites beyond the share give way to new ones, or nothing new could ever be kept."""
    bench = Bench([SegmentedLRU(protected_share=0.5)], mixed(24, max_num_sequences=2))
    for family in range(12):  # 3 blocks each: 36 in all, each found once
        for last in (900, 901):
            bench.add([family * 10 + 1] * 12 + [last], 1)
            bench.run()
    newest = bench.add([111] * 12 + [902], 1)
    bench.run()
    oldest = bench.add([1] * 12 + [902], 1)
    bench.run()
    assert newest.prompt_cached_tokens == 12
    assert oldest.prompt_cached_tokens == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"protected_hits": 0}, "protected_hits must be an integer of at least 1, got 0"),
        ({"protected_share": 1.5}, "protected_share must be a number, between 0 and 1, got 1.5"),
        ({"protected_share": -0.5}, "protected_share must be a number, between 0 and 1, got -0.5"),
        ({"protected_share": None}, "protected_share must be a number"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SegmentedLRU(**arguments)  # type: ignore[arg-type]  # wrong on purpose
