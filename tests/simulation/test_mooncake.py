"""The recorded trace: what follows from its hash ids alone must come out of the real prefix index."""

import pytest

from minivllm_plugin.simulation import CostModel, Trace, TraceRequest, simulate

HITS, BLOCKS = 105_710, 288_500  # counted from the ids: 0.3664


def test_what_its_ids_allow(mooncake: Trace) -> None:
    assert len(mooncake) == 12_031
    assert mooncake.ideal_hits() == (HITS, BLOCKS)


@pytest.mark.slow
def test_requests_one_after_another_find_all_that_their_ids_promise(mooncake: Trace) -> None:
    # Every id is one whole block; 16 tokens each instead of 512, since the index compares blocks and not their length.
    result = simulate(
        mooncake,
        cost_model=CostModel(0.001),
        num_blocks="unlimited",
        block_size=16,
        whole_blocks=True,
        max_num_sequences=1,
        max_num_batched_tokens=1 << 16,
    )
    assert result.num_finished == len(mooncake)
    assert result.num_evicted_blocks == 0
    assert sum(record.num_hit_blocks for record in result.requests) == HITS
    assert sum(record.num_prompt_blocks for record in result.requests) == BLOCKS
    assert f"{result.block_hit_rate:.4f}" == "0.3664"


def test_an_unlimited_pool_has_room_for_what_the_ids_stand_for() -> None:
    """And not for the recorded lengths, which are 32 times as long here: a pool of millions of blocks takes seconds to make."""
    trace = Trace(tuple(TraceRequest(float(at), 5120, 40, hash_ids=tuple(range(10))) for at in range(3)))
    result = simulate(trace, cost_model=CostModel(0.001), num_blocks="unlimited", block_size=16, whole_blocks=True)
    assert result.num_finished == 3
    assert result.num_evicted_blocks == 0
    assert result.settings["num_blocks"] == 3 * (10 + 2 + 2)


def test_blocks_of_512_find_all_but_the_partly_filled_ones(mooncake: Trace) -> None:
    first = mooncake.resized(1500)
    seen: set[int] = set()
    expected = 0
    for request in first:  # only full blocks enter the index, and one token is always left to compute
        findable = request.hash_ids[: (request.prompt_tokens - 1) // 512]
        expected += next((at for at, content in enumerate(findable) if content not in seen), len(findable))
        seen.update(request.hash_ids[: request.prompt_tokens // 512])
    settings = {"num_blocks": "unlimited", "max_num_sequences": 1, "max_num_batched_tokens": 1 << 16}
    result = simulate(first, cost_model=CostModel(0.001), **settings)
    assert sum(record.num_hit_blocks for record in result.requests) == expected
    assert result.replicas[0].block_size == 512
    assert expected > 0


def test_a_small_pool_finds_less(mooncake: Trace) -> None:
    first = mooncake.resized(400)
    large, small = (
        simulate(first, cost_model=CostModel(0.001), num_blocks=num_blocks, max_num_batched_tokens=8192)
        for num_blocks in (20_000, 400)
    )
    assert large.num_evicted_blocks == 0 < small.num_evicted_blocks
    assert small.block_hit_rate < large.block_hit_rate
