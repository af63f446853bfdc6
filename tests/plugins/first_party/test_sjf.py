"""``sjf``: least expected work first, waiting makes up for work, and the mean wait goes down."""

import pytest
from policy_bench import Bench, mixed, state, view

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.plugins.first_party.sjf import ShortestJobFirst
from minivllm_plugin.simulation import generate_trace, simulate


def test_work_is_what_is_left_to_compute_and_to_generate() -> None:
    policy = ShortestJobFirst(output_weight=2.0, assumed_tokens=100)
    assert policy.work(view("fresh", num_prompt_tokens=30, max_tokens=10)) == 50
    assert policy.work(view("cached", num_prompt_tokens=30, num_cached_tokens=16, max_tokens=10)) == 34
    assert policy.work(view("preempted", num_prompt_tokens=30, num_completion_tokens=8, max_tokens=10)) == 42
    assert policy.work(view("unbounded", num_prompt_tokens=30, max_tokens=None)) == 230
    assert ShortestJobFirst(output_weight=0).work(view("prompt only", num_prompt_tokens=30, max_tokens=10)) == 30


def test_the_least_work_goes_first() -> None:
    waiting = [view("long", 0, num_prompt_tokens=90, arrival_time=0.0), view("short", 1, num_prompt_tokens=5, arrival_time=0.0)]
    policy = ShortestJobFirst()
    assert policy.minivllm_order_waiting(waiting, state(0.0)) == ["short", "long"]
    assert policy.minivllm_order_waiting(waiting, state(0.0, num_running=63)) == ["short"]  # one place is free


def test_of_equals_who_came_first_goes_first() -> None:
    waiting = [view("b", 1, arrival_time=0.0), view("a", 0, arrival_time=0.0)]
    assert ShortestJobFirst().minivllm_order_waiting(waiting, state()) == ["a", "b"]


def test_a_second_of_waiting_makes_up_for_ageing_tokens() -> None:
    """100 tokens of work, at 50 a second: overtaken by those who come within two seconds, and by nobody later."""
    policy = ShortestJobFirst(ageing=50.0)
    long = view("long", 0, num_prompt_tokens=110, max_tokens=1, arrival_time=0.0)
    for gap, order in ((1.9, ["short", "long"]), (2.1, ["long", "short"])):
        short = view("short", 1, num_prompt_tokens=10, max_tokens=1, arrival_time=gap)
        assert policy.minivllm_order_waiting([long, short], state(gap)) == order
        assert policy.minivllm_order_waiting([long, short], state(gap + 1000)) == order  # both have aged


def test_nobody_starves_without_the_engines_guarantee() -> None:
    """A stream of short requests, two a second, one place. 42 tokens of work against 2: made up for in 16 seconds, so the 32 that
    come in these go first and nobody else."""
    bench = Bench([ShortestJobFirst(ageing=2.5)], mixed(64, max_num_sequences=1))
    long = bench.add([7] * 40, 2, request_id="long")
    for _ in range(40):
        bench.add([1], 1)
        bench.add([2], 1)
        bench.step()
    assert long.first_scheduled_step == 33
    assert long.num_overtaken < 64  # it was not the engine that helped


def test_the_mean_wait_goes_down() -> None:
    trace = generate_trace(200, rate=14, prompt_tokens="lognormal:300:1.0:4000", output_tokens="lognormal:150:1.0:1000", seed=1)
    first_come = simulate(trace, max_num_sequences=8)
    shortest = simulate(trace, ["sjf"], max_num_sequences=8)
    assert shortest.num_finished == first_come.num_finished == 200
    assert shortest.queue_time.mean < 0.75 * first_come.queue_time.mean
    assert shortest.queue_time.p50 < 0.5 * first_come.queue_time.p50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_weight": -1}, "output_weight must be a number, at least 0, got -1"),
        ({"ageing": float("nan")}, "ageing must be a number, at least 0, got nan"),
        ({"ageing": True}, "ageing must be a number"),
        ({"ageing": "fast"}, "ageing must be a number"),
        ({"assumed_tokens": 0}, "assumed_tokens must be an integer of at least 1, got 0"),
        ({"assumed_tokens": 2.5}, "assumed_tokens must be an integer"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ShortestJobFirst(**arguments)  # type: ignore[arg-type]  # wrong on purpose
