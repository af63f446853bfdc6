"""Leaping changes how long a simulation takes and nothing else; and the engine under it is the engine."""

from collections.abc import Sequence as SequenceABC
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.simulation import CostModel, SimulationResult, StepWork, Trace, TraceRequest, generate_trace, simulate

COST = CostModel(0.011, 0.0013, 0.0007, 0.00003, 0.00001, 0.002)


def traces() -> st.SearchStrategy[Trace]:
    """Up to 14 requests in bursts, with prompts that share starts."""
    ids = st.lists(st.integers(0, 1), max_size=6).map(lambda bits: tuple(10 * depth + bit for depth, bit in enumerate(bits)))
    request = st.builds(
        lambda arrival, ids, tail, output, priority: TraceRequest(
            arrival, 4 * len(ids) + tail, output, hash_ids=ids, priority=priority
        ),
        st.floats(0, 1.5).map(lambda value: round(value, 2)),
        ids,
        st.integers(1, 9),
        st.integers(1, 40),
        st.integers(0, 2),
    )
    return st.lists(request, min_size=1, max_size=14).map(lambda requests: Trace(tuple(requests), block_tokens=4))


def engines() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "num_blocks": st.integers(5, 60),
            "block_size": st.sampled_from([1, 2, 4, 7, 16]),
            "max_num_sequences": st.integers(1, 6),
            "max_num_batched_tokens": st.integers(2, 64),
            "enable_chunked_prefill": st.booleans(),
            "enable_prefix_caching": st.booleans(),
            "policy": st.sampled_from(["fcfs", "priority"]),
            "policies": st.sampled_from([(), (), (), ("sjf",), ("lpm", "slru"), ("lcf-victim",), ("fair",)]),
        }
    )


def differences(one: SimulationResult, other: SimulationResult) -> list[str]:
    """Names of what differs; times are compared for equality, not for closeness."""
    names = ["requests", "makespan", "served_at_last_arrival", "num_steps", "num_preemptions", "num_evicted_blocks", "mean_usage"]
    found = [name for name in names if getattr(one, name) != getattr(other, name)]
    pairs = zip(one.replicas, other.replicas, strict=True)
    return found + ["timeline" for mine, theirs in pairs if mine.timeline != theirs.timeline]


@given(trace=traces(), engine=engines())
@settings(max_examples=150, deadline=None, derandomize=True)
def test_leaping_equals_stepping(trace: Trace, engine: dict[str, Any]) -> None:
    leapt = simulate(trace, cost_model=COST, record_tokens=True, **engine)
    stepped = simulate(trace, cost_model=COST, record_tokens=True, leap=False, **engine)
    assert differences(leapt, stepped) == []
    assert stepped.num_leapt_steps == 0


@pytest.mark.parametrize("router", ["round_robin", "least_loaded", "prefix_aware"])
def test_leaping_equals_stepping_behind_a_router(router: str) -> None:
    trace = generate_trace(80, rate=20, turns=3, think_seconds=0.5, shared_prefix_tokens=40, num_prefixes=3, tenants=2)
    both = [simulate(trace, cost_model=COST, replicas=3, router=router, num_blocks=60, leap=leap) for leap in (True, False)]
    assert differences(*both) == []
    assert both[0].num_leapt_steps > 100


def test_most_steps_are_leapt_over() -> None:
    trace = generate_trace(40, rate=2, output_tokens=200)
    result = simulate(trace, cost_model=COST)
    assert result.num_leapt_steps > 0.8 * result.num_steps


def test_a_leap_crosses_blocks_but_not_an_empty_pool() -> None:
    trace = Trace((TraceRequest(0.0, 6, 200), TraceRequest(0.0, 6, 200)))
    results = [
        simulate(trace, cost_model=COST, num_blocks=70, block_size=4, record_tokens=True, leap=leap) for leap in (True, False)
    ]
    assert differences(*results) == []
    assert results[0].num_preemptions > 0
    assert results[0].num_leapt_steps > 150


class Watched:
    """Counts the steps that a cost model is asked about, and the context in each."""

    def __init__(self) -> None:
        self.seen: list[StepWork] = []

    def __call__(self, work: StepWork) -> float:
        self.seen.append(work)
        return COST(work)


def test_the_cost_model_is_asked_about_the_same_steps() -> None:
    trace = generate_trace(30, rate=5, turns=2, think_seconds=1.0)
    leapt, stepped = Watched(), Watched()
    simulate(trace, cost_model=leapt, num_blocks=80)
    simulate(trace, cost_model=stepped, num_blocks=80, leap=False)
    assert leapt.seen == stepped.seen
    assert leapt.seen


def run_by_hand(trace: Trace, block_size: int, num_blocks: int) -> tuple[int, int, list[int]]:
    """The same requests, all there at once, as lists of real tokens: steps, preemptions, and the step each ended in."""
    scheduler = Scheduler(4, 32, num_blocks, block_size, -1, enable_chunked_prefill=True)
    sequences: list[Sequence] = []
    completions: dict[str, int] = {}
    for index, request in enumerate(trace):
        tokens = request.tokens(index, trace.block_tokens)
        params = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
        sequences.append(Sequence(list(tokens), sampling_params=params, request_id=str(index)))
        completions[str(index)] = tokens.completion
        scheduler.add_sequence(sequences[-1])
    ended: dict[str, int] = {}
    while not scheduler.is_finished():
        batch: SequenceABC[Sequence] = scheduler.schedule()[0]
        scheduler.postprocess(batch, [completions[seq.request_id or ""] for seq in batch])
        ended |= {seq.request_id or "": scheduler.num_steps for seq in batch if seq.is_finished}
        scheduler.check_integrity()
    return scheduler.num_steps, scheduler.num_preemptions, [ended[str(index)] for index in range(len(trace))]


@pytest.mark.parametrize("block_size", [3, 4, 8])
def test_synthetic_tokens_are_scheduled_like_real_ones(block_size: int) -> None:
    made = generate_trace(30, turns=3, prompt_tokens="uniform:4:20", output_tokens="uniform:2:30", shared_prefix_tokens=13)
    trace = Trace(tuple(TraceRequest(0.0, one.prompt_tokens, one.output_tokens, segments=one.segments) for one in made))
    num_blocks = 360 // block_size
    result = simulate(
        trace,
        cost_model=lambda work: 1.0,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_sequences=4,
        max_num_batched_tokens=32,
    )
    steps, preemptions, ended = run_by_hand(trace, block_size, num_blocks)
    assert result.num_steps == steps
    assert result.num_preemptions == preemptions
    assert [record.finished for record in result.requests] == ended
    assert result.token_hit_rate > 0.1
