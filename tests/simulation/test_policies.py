"""Policies in the simulator: the engine's own machinery asks them, with virtual times, and leaps stay honest."""

from collections.abc import Sequence

import pytest

from minivllm_plugin.errors import ConfigError, PluginError
from minivllm_plugin.events import StepReport
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.simulation import CostModel, Trace, TraceRequest, compare, generate_trace, simulate
from minivllm_plugin.views import Budget, EngineState, Reject, RequestView


class LastInFirstOut:
    minivllm_name = "lifo"

    def __init__(self) -> None:
        self.moments: list[float] = []

    @hookimpl
    def minivllm_order_waiting(self, waiting: Sequence[RequestView], state: EngineState) -> list[str]:
        self.moments.append(state.now)
        return [request.request_id for request in sorted(waiting, key=lambda request: -request.arrival_time)]


class Door:
    @hookimpl
    def minivllm_admit(self, request: RequestView, state: EngineState) -> Reject | None:
        return Reject("no guests") if request.tenant == "guest" else None

    @hookimpl
    def minivllm_cache_salt(self, request: RequestView) -> str:
        return request.tenant


class NightShift:
    """Computes little before noon, which is at 20 s."""

    @hookimpl
    def minivllm_step_budget(self, state: EngineState) -> Budget | None:
        return Budget(num_tokens=2) if state.now < 20 else None


class StepCounter:
    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0

    @hookimpl
    def minivllm_order_waiting(self, waiting: Sequence[RequestView]) -> None:
        return None

    @hookimpl
    def minivllm_step_finished(self, report: StepReport) -> None:
        self.num_steps += 1
        self.num_tokens += len(report.token_ids)


class Broken:
    @hookimpl
    def minivllm_order_waiting(self, waiting: Sequence[RequestView]) -> list[str]:
        raise RuntimeError("out of order")


def test_a_policy_decides_who_comes_next(cost: CostModel) -> None:
    trace = Trace((TraceRequest(0.0, 2, 2), TraceRequest(0.5, 2, 1), TraceRequest(1.0, 2, 1), TraceRequest(1.5, 2, 1)))
    policy = LastInFirstOut()
    result = simulate(trace, [policy], cost, max_num_sequences=1)
    assert [record.finished for record in result.requests] == [3.25, 9.25, 7.25, 5.25]
    assert policy.moments == [3.25, 5.25]  # asked while two or more wait and a place is free, at virtual times
    assert result.name == "lifo"


def test_admission_and_salt_are_asked_before_queueing(cost: CostModel) -> None:
    rows = [("ann", 0.0), ("ann", 10.0), ("bob", 20.0), ("guest", 30.0)]
    trace = Trace(tuple(TraceRequest(at, 9, 1, (1, 2), tenant=tenant) for tenant, at in rows), block_tokens=8)
    result = simulate(trace, [Door()], cost, block_size=4)
    assert [record.num_cached_tokens for record in result.requests] == [0, 8, 0, 0]
    assert "no guests" in (result.requests[3].rejected or "")
    assert (result.num_finished, result.num_rejected) == (3, 1)


def test_a_budget_that_changes_with_time_forbids_leaps(cost: CostModel) -> None:
    trace = Trace((TraceRequest(0.0, 6, 20), TraceRequest(0.0, 6, 20)))
    leapt, stepped = (simulate(trace, [NightShift()], cost, record_tokens=True, leap=leap) for leap in (True, False))
    assert leapt.requests == stepped.requests
    assert leapt.num_leapt_steps == 0
    assert leapt.requests[0].first_token == 2.0 * 3


def test_an_observer_is_told_of_every_step(cost: CostModel) -> None:
    trace = generate_trace(20, rate=0.2)
    counter = StepCounter()
    result = simulate(trace, [counter], cost)
    assert counter.num_steps == result.num_steps
    assert counter.num_tokens == result.num_output_tokens == sum(request.output_tokens for request in trace)


def test_a_policy_that_fails_ends_the_simulation(cost: CostModel) -> None:
    trace = Trace((TraceRequest(0.0, 2, 2), TraceRequest(0.0, 2, 2), TraceRequest(0.0, 2, 2)))
    with pytest.raises(PluginError, match="out of order"):
        simulate(trace, [Broken()], cost, max_num_sequences=1)


def test_unknown_policies_are_refused(cost: CostModel) -> None:
    with pytest.raises(PluginError, match="nearest"):
        simulate(Trace((TraceRequest(0.0, 2, 2),)), ["nearest"], cost)


def test_shortest_first_shortens_the_mean_wait(cost: CostModel) -> None:
    trace = Trace(tuple(TraceRequest(0.0, 4, output) for output in (40, 30, 20, 10, 5, 2)))
    fcfs, sjf = compare(trace, ["fcfs", "sjf"], cost, max_num_sequences=1)
    assert sjf.latency.mean < 0.7 * fcfs.latency.mean
    assert sjf.makespan == fcfs.makespan
    assert [fcfs.name, sjf.name] == ["fcfs", "sjf"]


def test_several_policies_in_one_variant_and_the_engines_own_order(cost: CostModel) -> None:
    trace = generate_trace(30, rate=0.5)
    both, priority = compare(trace, ["lpm+slru", "priority"], cost, num_blocks=80)
    assert both.settings["policies"] == ["lpm", "slru"]
    assert priority.settings["policy"] == "priority"
    assert priority.settings["policies"] == []
    with pytest.raises(ConfigError, match="variant"):
        compare(trace, ["+"], cost)


def test_processes_find_the_same(cost: CostModel) -> None:
    trace = generate_trace(30, rate=0.5)
    here = compare(trace, ["fcfs", "sjf"], cost)
    there = compare(trace, ["fcfs", "sjf"], cost, processes=2)
    assert [one.requests for one in here] == [one.requests for one in there]
