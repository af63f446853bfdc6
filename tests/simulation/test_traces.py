"""Traces as values: repetition, rates, contents, and those that are drawn."""

import statistics
from itertools import pairwise

import pytest

from minivllm_plugin.engine.block_manager import BlockManager
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation import Lengths, Trace, TraceRequest, generate_trace, simulate


def shared_start(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next(
        (at for at, (mine, theirs) in enumerate(zip(one, other, strict=False)) if mine != theirs), min(len(one), len(other))
    )


def test_equal_ids_mean_equal_tokens_and_nothing_else_does() -> None:
    prompts = [
        TraceRequest(0.0, 20, 3, hash_ids=(1, 2, 3)).tokens(0, 8),
        TraceRequest(0.0, 20, 3, hash_ids=(1, 2, 4)).tokens(1, 8),
        TraceRequest(0.0, 20, 3).tokens(2, 8),
        TraceRequest(0.0, 20, 3).tokens(3, 8),
    ]
    lists = [tuple(tokens) for tokens in prompts]
    assert [len(tokens) for tokens in lists] == [20] * 4
    assert shared_start(lists[0], lists[1]) == 16
    assert [shared_start(lists[0], lists[2]), shared_start(lists[2], lists[3])] == [0, 0]


def test_slices_are_those_of_the_whole_list() -> None:
    tokens = TraceRequest(0.0, 19, 3, segments=((5, 3), (6, 9), (7, 2))).tokens(4, 8)
    for token in (1, 2, 3):
        tokens.append(token)
    whole = tuple(tokens)
    assert len(whole) == len(tokens) == 22
    assert len(set(whole)) == 5  # three segments, a rest of its own, the completion
    for start in range(-3, 23):
        for stop in range(-3, 25):
            assert tokens[start:stop] == whole[start:stop]
    assert tokens[::2] == whole[::2]
    assert [tokens[at] for at in range(-22, 22)] == [whole[at] for at in range(-22, 22)]
    with pytest.raises(IndexError):
        tokens[22]


def test_keys_of_the_prefix_index_are_those_of_real_tokens() -> None:
    pool = BlockManager(4, 8)
    tokens = TraceRequest(0.0, 24, 1, hash_ids=(1, 2, 3)).tokens(0, 8)
    assert pool.compute_hash(tokens[8:16], 77) == pool.compute_hash(list(tokens)[8:16], 77)  # type: ignore[arg-type]


def test_a_repetition_shares_nothing_with_the_first_run() -> None:
    trace = Trace((TraceRequest(0.0, 8, 1, (1, 2)), TraceRequest(3.0, 8, 1, (1, 3)), TraceRequest(4.0, 8, 1)), block_tokens=4)
    longer = trace.resized(8)
    assert [request.arrival for request in longer] == [0.0, 3.0, 4.0, 6.0, 9.0, 10.0, 12.0, 15.0]
    assert trace.ideal_hits() == (1, 4)
    assert longer.ideal_hits() == (3, 12)
    assert trace.resized(2).requests == trace.requests[:2]
    result = simulate(longer, cost_model=lambda work: 0.01)
    assert sum(record.num_hit_blocks for record in result.requests) == 3


def test_a_scaled_rate_divides_the_arrivals() -> None:
    trace = generate_trace(50, rate=2)
    assert trace.scaled(4).duration == pytest.approx(trace.duration / 4)
    for rate in (0, -1, float("nan")):
        with pytest.raises(ConfigError, match="rate"):
            trace.scaled(rate)


def test_requests_are_put_in_the_order_of_their_arrival() -> None:
    trace = Trace((TraceRequest(2.0, 1, 1), TraceRequest(1.0, 2, 1), TraceRequest(1.0, 3, 1)))
    assert [request.prompt_tokens for request in trace] == [2, 3, 1]
    with pytest.raises(ConfigError, match="at least one request"):
        Trace(())


def test_a_seed_draws_the_same_trace_and_another_seed_another() -> None:
    settings = {"rate": 3.0, "turns": 3, "tenants": 2, "shared_prefix_tokens": 10, "num_prefixes": 2}
    assert generate_trace(60, seed=1, **settings) == generate_trace(60, seed=1, **settings)  # type: ignore[arg-type]
    assert generate_trace(60, seed=1, **settings) != generate_trace(60, seed=2, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("burstiness", "expected"), [(0.0, 0.0), (1.0, 1.0), (4.0, 4.0)])
def test_burstiness_is_the_variance_of_the_gaps(burstiness: float, expected: float) -> None:
    trace = generate_trace(4000, rate=5.0, burstiness=burstiness)
    gaps = [later.arrival - earlier.arrival for earlier, later in pairwise(trace)]
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.1)
    assert statistics.pvariance(gaps) / 0.2**2 == pytest.approx(expected, rel=0.25, abs=1e-9)


def test_a_turn_quotes_all_that_was_said_before() -> None:
    trace = generate_trace(3, turns=3, shared_prefix_tokens=20, think_seconds=5.0)
    first, second, third = (tuple(request.tokens(index, 512)) for index, request in enumerate(trace))
    assert second[: len(first)] == first
    assert third[: len(second)] == second
    answer = trace.requests[0].output_tokens
    assert set(second[len(first) : len(first) + answer]) == {trace.requests[0].tokens(0, 512).completion}
    result = simulate(trace, cost_model=lambda work: 1e-6, block_size=1, num_blocks=5000)
    found = [record.num_cached_tokens for record in result.requests]
    assert found == [0, len(first) + answer - 1, len(second) + trace.requests[1].output_tokens - 1]  # the last one has no K/V


def test_lengths_and_tenants_are_drawn_as_asked() -> None:
    trace = generate_trace(
        2000, prompt_tokens="lognormal:100:0.5:300", output_tokens=7, tenants={"a": 3.0, "b": 1.0}, shared_prefix_tokens=0
    )
    lengths = [request.prompt_tokens for request in trace]
    assert statistics.median(lengths) == pytest.approx(100, rel=0.1)
    assert max(lengths) == 300
    assert {request.output_tokens for request in trace} == {7}
    assert sum(request.tenant == "a" for request in trace) / 2000 == pytest.approx(0.75, abs=0.04)


@pytest.mark.parametrize(
    "text", ["0", "many", "uniform:5:4", "uniform:5", "lognormal:1", "lognormal:10:-1", "gamma:1:2", "uniform:0:3"]
)
def test_lengths_that_make_no_distribution(text: str) -> None:
    with pytest.raises(ConfigError, match="lengths"):
        Lengths.parse(text)


@pytest.mark.parametrize("argument", ["num_requests", "turns", "tenants", "num_prefixes"])
def test_counts_must_be_at_least_one(argument: str) -> None:
    with pytest.raises(ConfigError, match=argument):
        generate_trace(**{"num_requests": 3, argument: 0})


@pytest.mark.parametrize("argument", ["rate", "burstiness", "think_seconds", "shared_prefix_tokens"])
def test_negative_settings_are_refused(argument: str) -> None:
    with pytest.raises(ConfigError, match=argument):
        generate_trace(3, **{argument: -1})  # type: ignore[arg-type]
