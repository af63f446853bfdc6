"""Whatever policies decide, the greedy tokens of every request stay what they are without any.

Random engines over a ledger, where the next token is a hash of all tokens before it: one that was lost, doubled or read from
somebody else's block changes all that follow. Invariants are checked after every step. Then the same through LLM's own
thread, and with the real model.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_bench import Bench
from settled import settled_snapshot

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.plugins.first_party.fair import FairShare
from minivllm_plugin.plugins.first_party.lcf_victim import LeastComputedVictim
from minivllm_plugin.plugins.first_party.lpm import LongestPrefixMatch
from minivllm_plugin.plugins.first_party.priority import PriorityPolicy
from minivllm_plugin.plugins.first_party.sjf import ShortestJobFirst
from minivllm_plugin.plugins.first_party.slru import SegmentedLRU
from minivllm_plugin.testing import HashedTokens, scripted_llm

NAMES = ("priority", "sjf", "lpm", "fair", "lcf-victim", "slru")
VOCABULARY, EOS = 60, 0
HASHED = HashedTokens(VOCABULARY)

POLICIES = st.lists(
    st.one_of(
        st.builds(PriorityPolicy),
        st.builds(ShortestJobFirst, output_weight=st.floats(0, 4), ageing=st.floats(0, 100)),
        st.builds(LongestPrefixMatch, ageing=st.floats(0, 100), longest_queue=st.integers(0, 6)),
        st.builds(FairShare, output_weight=st.floats(0.1, 4), max_idle_tenants=st.integers(0, 2)),
        st.builds(LeastComputedVictim),
        st.builds(SegmentedLRU, protected_hits=st.integers(1, 3), protected_share=st.floats(0, 1)),
    ),
    min_size=1,
    max_size=6,
    unique_by=lambda policy: policy.minivllm_name,
)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """A pool, a mode and requests with their step of arrival; each fits the pool."""
    chunked = draw(st.booleans())
    num_blocks, block_size = draw(st.integers(2, 14)), draw(st.sampled_from([4, 3, 2, 1, 8]))
    budget = draw(st.sampled_from([64, 13, 8, 5, 3, 2, 1]))
    longest = num_blocks * block_size if chunked else min(num_blocks * block_size, budget)
    prefixes = [[token] * draw(st.integers(0, 12)) for token in (5, 6, 7)]
    requests = []
    for number in range(draw(st.sampled_from([12, 8, 4, 2, 1]))):
        own = draw(st.lists(st.integers(1, VOCABULARY - 1), min_size=1, max_size=8))
        prompt = ([] if longest == 1 else draw(st.sampled_from(prefixes)))[: longest - 1] + own
        room = num_blocks * block_size - len(prompt[:longest])
        requests.append(
            {
                "arrives": draw(st.integers(0, 10)),
                "prompt": prompt[:longest],
                "max_tokens": draw(st.integers(1, max(1, min(room, 24)))),
                "request_id": f"r{number}",
                "priority": draw(st.integers(0, 3)),
                "tenant": draw(st.sampled_from("ABC")),
                "cache_salt": draw(st.sampled_from([None, None, "salt"])),
                "fits": room >= 1,
            }
        )
    return {
        "arguments": (draw(st.sampled_from([5, 4, 3, 2, 1])), budget, num_blocks, block_size, EOS),
        "options": {
            "enable_chunked_prefill": chunked,
            "enable_prefix_caching": draw(st.booleans()),
            "policy": draw(st.sampled_from(["fcfs", "priority"])),
        },
        "requests": [request for request in requests if request.pop("fits")],
    }


def completions(case: dict[str, Any], policies: list[Any]) -> dict[str, list[int]]:
    bench = Bench(policies, Scheduler(*case["arguments"], **case["options"]), VOCABULARY, HASHED)
    upcoming = sorted(case["requests"], key=lambda request: request["arrives"])
    for step in range(20_000):
        while upcoming and upcoming[0]["arrives"] <= step:
            request = {name: value for name, value in upcoming.pop(0).items() if name != "arrives"}
            bench.add(request.pop("prompt"), request.pop("max_tokens"), ignore_eos=False, **request)
        if not upcoming and bench.scheduler.is_finished():
            break
        bench.step()
    assert bench.scheduler.is_finished()
    assert all(seq.finish_reason in ("stop", "length") for seq in bench.sequences)
    return {seq.request_id or "": seq.completion_token_ids for seq in bench.sequences}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases(), policies=POLICIES)
def test_in_random_engines(case: dict[str, Any], policies: list[Any]) -> None:
    found = completions(case, policies)
    for request in case["requests"]:
        expected = HASHED.continue_prompt(request["prompt"], request["max_tokens"])
        if EOS in expected:
            expected = expected[: expected.index(EOS) + 1]
        assert found[request["request_id"]] == expected


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(case=cases())
def test_without_policies_the_expectation_is_the_same(case: dict[str, Any]) -> None:
    """Or the test above would compare with something that the engine never gave."""
    assert completions(case, []) == completions(case, [SegmentedLRU(), FairShare(), LeastComputedVictim()])


@pytest.mark.parametrize("policies", [[name] for name in NAMES] + [list(NAMES), list(reversed(NAMES))], ids="+".join)
def test_through_the_service(policies: list[str]) -> None:
    """LLM's own thread, a pool in which nothing fits twice, two rounds, so that the second finds the first one's blocks."""
    prompts = [[number % 3 + 1] * 9 + [100 + number] for number in range(16)]
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    options = {"policies": policies, "plugin_errors": "raise", "max_num_sequences": 6, "max_num_batched_tokens": 16}
    llm, _ = scripted_llm(num_blocks=14, options=options)
    with llm:
        for _ in range(2):
            streams = [
                llm.submit(prompt, params, priority=number % 4, metadata={"tenant": "AB"[number % 2]})
                for number, prompt in enumerate(prompts)
            ]
            found = [stream.result().outputs[0].token_ids for stream in streams]
            assert [list(tokens) for tokens in found] == [HashedTokens(1000).continue_prompt(prompt, 12) for prompt in prompts]
        snapshot = settled_snapshot(llm)
    assert snapshot is not None
    assert snapshot.num_preemptions > 0
    assert snapshot.prefix_hit_tokens > 0


def _tokens_of_the_real_model(path: Path, policies: list[str]) -> list[list[int]]:
    """The pool is too small for all of them at once; float32, so that a batch's company changes nothing."""
    texts = ["The capital of France is", "Once upon a time, in a village by the sea,", "Water boils at", "1, 1, 2, 3, 5, 8, 13,"]
    params = SamplingParams(temperature=0.0, max_tokens=24)
    sizes: dict[str, Any] = {"dtype": "float32", "num_blocks": 24, "block_size": 4, "max_num_batched_tokens": 32}
    with LLM(str(path), policies=policies, **sizes) as llm:
        streams = [
            llm.submit(text, params, priority=number % 3, metadata={"tenant": "AB"[number % 2]})
            for number, text in enumerate(texts * 2)
        ]
        found = [list(stream.result().outputs[0].token_ids) for stream in streams]
        snapshot = settled_snapshot(llm)
    assert snapshot is not None
    assert snapshot.num_preemptions > 0
    return found


@pytest.fixture(scope="module")
def without_policies(smollm2_gguf: Path) -> list[list[int]]:
    """What the real model says when nobody steers: each text is asked twice."""
    found = _tokens_of_the_real_model(smollm2_gguf, [])
    assert found[:4] == found[4:]
    return found


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    "policies", [["sjf", "lcf-victim", "slru"], ["lpm", "lcf-victim"], ["fair", "slru"], ["priority"]], ids="+".join
)
def test_with_the_real_model(smollm2_gguf: Path, without_policies: list[list[int]], policies: list[str]) -> None:
    assert _tokens_of_the_real_model(smollm2_gguf, policies) == without_policies
