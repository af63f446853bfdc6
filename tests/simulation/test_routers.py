"""Several replicas: who gets what, and that one replica is one engine whatever stands before it."""

from collections.abc import Callable, Sequence

import pytest

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation import CostModel, Trace, TraceRequest, generate_trace, simulate
from minivllm_plugin.simulation.prefix_tree import PrefixTree
from minivllm_plugin.simulation.routers import ROUTERS, PrefixAware, RoutedRequest

Requests = Callable[..., Trace]


@pytest.mark.parametrize("router", list(ROUTERS))
def test_one_replica_behind_any_router_is_no_router(router: str, cost: CostModel) -> None:
    trace = generate_trace(40, rate=0.5, turns=2, tenants=2)
    assert simulate(trace, cost_model=cost, router=router).requests == simulate(trace, cost_model=cost).requests


def test_a_replica_that_gets_everything_behaves_as_if_alone(cost: CostModel) -> None:
    trace = generate_trace(60, rate=0.5, turns=3, shared_prefix_tokens=50)
    alone = simulate(trace, cost_model=cost, num_blocks=100, record_tokens=True)
    beside = simulate(trace, cost_model=cost, num_blocks=100, record_tokens=True, replicas=3, router=lambda routed, loads: 1)
    assert {record.replica for record in beside.requests} == {1}
    for record in beside.requests:
        record.replica = 0
    assert alone.requests == beside.requests
    assert alone.replicas[0].timeline == beside.replicas[1].timeline
    assert beside.replicas[0].num_requests == beside.replicas[0].num_steps == 0


def test_round_robin_goes_round(requests: Requests, cost: CostModel) -> None:
    trace = requests(*[(0.0, 4, 2)] * 7)
    result = simulate(trace, cost_model=cost, replicas=3)
    assert [record.replica for record in result.requests] == [0, 1, 2, 0, 1, 2, 0]
    assert result.name == "fcfs, 3 x round_robin"


def test_least_loaded_looks_at_what_has_not_ended(requests: Requests, cost: CostModel) -> None:
    # 12 tokens go to 0 and end at 9.25; 4 go to 1 and end at 3; the third finds (12, 0), the fourth (12, 6), the last (0, 0).
    trace = requests((0.0, 10, 2), (0.5, 3, 1), (3.5, 4, 2), (3.75, 1, 1), (20.0, 2, 1))
    result = simulate(trace, cost_model=cost, replicas=2, router="least_loaded")
    assert [record.replica for record in result.requests] == [0, 1, 1, 1, 0]


def test_an_end_inside_a_running_step_is_not_known_before_it(requests: Requests, cost: CostModel) -> None:
    # The step of request 0 began at 0 and ends at 3. At 2.9 its end is in the future, at 3 it is there.
    for arrival, replica in ((2.9, 1), (3.0, 0)):
        result = simulate(requests((0.0, 4, 1), (arrival, 4, 1)), cost_model=cost, replicas=2, router="least_loaded")
        assert result.requests[1].replica == replica


def test_prefix_aware_sends_a_conversation_where_it_was(cost: CostModel) -> None:
    trace = generate_trace(120, rate=0.2, turns=6, think_seconds=30.0, shared_prefix_tokens=0)
    spread, kept = (
        simulate(trace, cost_model=cost, replicas=3, num_blocks=2000, router=router) for router in ("round_robin", "prefix_aware")
    )
    assert kept.token_hit_rate > 1.5 * spread.token_hit_rate


def test_prefix_aware_leaves_a_replica_that_has_far_more_to_do() -> None:
    router = PrefixAware()
    hot = RoutedRequest(0, TraceRequest(0.0, 100, 10, segments=((1, 100),)), ((1, 100),))
    assert router(hot, (0, 0)) == 0
    assert router(hot, (110, 100)) == 0
    assert router(hot, (500, 100)) == 1
    with pytest.raises(ConfigError, match="max_imbalance"):
        PrefixAware(0.5)


def test_the_tree_matches_starts_and_forgets_the_oldest_leaves_first() -> None:
    tree = PrefixTree(4)
    tree.insert([(1, 10), (2, 10), (3, 5)])
    assert tree.match([(1, 10), (2, 10), (4, 10)]) == 20
    assert tree.match([(2, 10)]) == 0
    tree.insert([(1, 10), (9, 7), (8, 1)])
    assert len(tree) == 4
    assert tree.match([(1, 10), (2, 10), (3, 5)]) == 20
    assert tree.match([(1, 10), (9, 7), (8, 1)]) == 18


def test_a_router_of_ones_own_sees_request_and_loads(requests: Requests, cost: CostModel) -> None:
    seen: list[tuple[int, int, tuple[int, ...]]] = []

    def router(routed: RoutedRequest, loads: Sequence[int]) -> int:
        seen.append((routed.number, routed.request.prompt_tokens, tuple(loads)))
        return routed.number % 2

    simulate(requests((0.0, 4, 2), (0.0, 5, 2), (0.25, 6, 1)), cost_model=cost, replicas=2, router=router)
    assert seen == [(0, 4, (0, 0)), (1, 5, (6, 0)), (2, 6, (6, 7))]


@pytest.mark.parametrize("answer", [2, -1, None, True, "0"])
def test_a_router_that_names_no_replica_is_an_error(requests: Requests, answer: object) -> None:
    with pytest.raises(ConfigError, match="router answered"):
        simulate(requests((0.0, 4, 2)), replicas=2, router=lambda routed, loads: answer)  # type: ignore[arg-type,return-value]


@pytest.mark.parametrize("router", ["nearest", 7, PrefixAware])
def test_an_unknown_router_is_refused(requests: Requests, router: object) -> None:
    with pytest.raises(ConfigError, match="router"):
        simulate(requests((0.0, 4, 2)), replicas=2, router=router)  # type: ignore[arg-type]
