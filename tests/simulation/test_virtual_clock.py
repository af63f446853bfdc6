"""Small cases whose every time was worked out by hand: a second a step, 0.5 s a prefill token, 0.25 s a decode."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation import CostModel, SimulationResult, StepWork, Trace, TraceRequest
from minivllm_plugin.testing import simulate

Requests = Callable[..., Trace]
LEAPING = pytest.mark.parametrize("leap", [True, False], ids=["leaping", "stepping"])


def token_times(result: SimulationResult) -> list[list[float]]:
    return [list(record.token_times or ()) for record in result.requests]


@LEAPING
def test_one_request(requests: Requests, cost: CostModel, leap: bool) -> None:
    result = simulate(requests((2.0, 4, 3)), cost_model=cost, leap=leap, record_tokens=True)
    assert token_times(result) == [[5.0, 6.25, 7.5]]
    (record,) = result.requests
    assert (record.scheduled, record.first_token, record.finished, record.finish_reason) == (2.0, 5.0, 7.5, "length")
    assert (record.ttft, record.tpot, record.latency, record.queue_time) == (3.0, 1.25, 5.5, 0.0)
    assert result.makespan == 5.5
    assert result.output_throughput == pytest.approx(3 / 5.5)
    assert result.total_throughput == pytest.approx(7 / 5.5)
    assert result.num_steps == 3


@LEAPING
def test_one_that_arrives_while_a_step_runs_joins_the_next(requests: Requests, cost: CostModel, leap: bool) -> None:
    result = simulate(requests((0.0, 4, 3), (1.0, 2, 2)), cost_model=cost, leap=leap, record_tokens=True)
    assert token_times(result) == [[3.0, 5.25, 6.75], [5.25, 6.75]]
    assert result.requests[1].queue_time == 2.0


@LEAPING
def test_an_arrival_at_the_very_start_of_a_step_belongs_to_it(requests: Requests, cost: CostModel, leap: bool) -> None:
    result = simulate(requests((0.0, 4, 3), (3.0, 2, 1)), cost_model=cost, leap=leap, record_tokens=True)
    assert token_times(result) == [[3.0, 5.25, 6.5], [5.25]]


@LEAPING
def test_an_idle_engine_waits_for_the_next_arrival(requests: Requests, cost: CostModel, leap: bool) -> None:
    result = simulate(requests((0.0, 2, 1), (10.0, 2, 1)), cost_model=cost, leap=leap)
    assert [record.finished for record in result.requests] == [2.0, 12.0]
    assert result.replicas[0].busy_seconds == 4.0


@LEAPING
def test_a_long_prompt_is_cut_by_the_budget(requests: Requests, cost: CostModel, leap: bool) -> None:
    result = simulate(requests((0.0, 10, 2)), cost_model=cost, leap=leap, record_tokens=True, max_num_batched_tokens=4)
    assert token_times(result) == [[3.0 + 3.0 + 2.0, 9.25]]


@LEAPING
def test_without_chunked_prefill_a_prompt_holds_up_who_decodes(requests: Requests, cost: CostModel, leap: bool) -> None:
    trace = requests((0.0, 4, 3), (1.0, 2, 2))
    result = simulate(trace, cost_model=cost, leap=leap, record_tokens=True, enable_chunked_prefill=False)
    assert token_times(result) == [[3.0, 6.5, 7.75], [5.0, 6.5]]


@LEAPING
def test_a_cached_prefix_is_not_computed_again(cost: CostModel, leap: bool) -> None:
    one = TraceRequest(0.0, 9, 1, hash_ids=(7, 8, 9))
    again = TraceRequest(20.0, 9, 1, hash_ids=(7, 8, 9))
    result = simulate(Trace((one, again), block_tokens=4), cost_model=cost, leap=leap)
    assert [record.finished for record in result.requests] == [5.5, 21.25]  # 8 of 9 tokens are found
    assert [record.num_cached_tokens for record in result.requests] == [0, 8]
    assert result.token_hit_rate == pytest.approx(8 / 18)
    assert result.block_hit_rate == pytest.approx(2 / 6)


@LEAPING
def test_a_preempted_request_is_computed_again(requests: Requests, cost: CostModel, leap: bool) -> None:
    # Four blocks of 2. Both grow to 5 tokens, then one of them must go; it finds its first block when it returns.
    trace = requests((0.0, 2, 4), (0.0, 2, 4))
    result = simulate(trace, cost_model=cost, leap=leap, record_tokens=True, num_blocks=4, block_size=2)
    assert token_times(result) == [[3.0, 4.5, 6.0, 7.25], [3.0, 4.5, 6.0, 9.75]]
    assert [record.num_preemptions for record in result.requests] == [0, 1]
    assert result.num_preemptions == 1
    assert result.num_evicted_blocks == 2
    assert result.replicas[0].peak_usage == 1.0


@LEAPING
def test_priority_goes_first(cost: CostModel, leap: bool) -> None:
    trace = Trace((TraceRequest(0.0, 2, 2), TraceRequest(0.5, 2, 1, priority=5), TraceRequest(1.0, 2, 1, priority=-1)))
    by_arrival = simulate(trace, cost_model=cost, leap=leap, max_num_sequences=1)
    by_priority = simulate(trace, cost_model=cost, leap=leap, max_num_sequences=1, policy="priority")
    assert [record.finished for record in by_arrival.requests] == [3.25, 5.25, 7.25]
    assert [record.finished for record in by_priority.requests] == [3.25, 7.25, 5.25]


def test_what_can_never_run_is_rejected(requests: Requests, cost: CostModel) -> None:
    result = simulate(requests((0.0, 9, 1), (0.0, 4, 1)), cost_model=cost, num_blocks=2, block_size=4)
    assert result.num_rejected == 1
    assert "needs 3 KV blocks" in (result.requests[0].rejected or "")
    assert result.requests[1].finished == 3.0
    assert result.requests[0].ttft is None


def test_a_full_queue_rejects(requests: Requests, cost: CostModel) -> None:
    rows = [(0.0, 2, 8), (0.5, 2, 1), (0.6, 2, 1), (0.7, 2, 1)]
    result = simulate(requests(*rows), cost_model=cost, max_num_sequences=1, max_queue_size=2)
    assert [record.rejected for record in result.requests] == [None, None, None, "the waiting queue is full"]


@pytest.mark.parametrize("answer", [0.0, -1.0, math.nan, math.inf])
@LEAPING
def test_a_cost_that_is_no_time_is_an_error(requests: Requests, answer: float, leap: bool) -> None:
    def cost(work: StepWork) -> float:
        return answer if work.num_context_tokens > 8 else 1.0

    with pytest.raises(ConfigError, match="finite time greater than 0"):
        simulate(requests((0.0, 4, 20)), cost_model=cost, leap=leap)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_block": 3}, "unknown setting 'num_block'"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"num_blocks": "many"}, "'unlimited'"),
        ({"block_size": 0}, "block_size"),
        ({"max_num_sequences": 0}, "max_num_sequences"),
        ({"max_queue_size": -1}, "max_queue_size"),
        ({"replicas": 0}, "replicas"),
        ({"policy": "lottery"}, "policy must be"),
    ],
)
def test_impossible_settings_are_refused_by_name(requests: Requests, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(requests((0.0, 2, 2)), **settings)
