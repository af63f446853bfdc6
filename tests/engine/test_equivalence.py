"""A request's tokens are the same whatever happens around it: hundreds of seeded configurations, nine ways each.

Every way is driven with a ledger and all invariants, so a difference would show as a wrong read before it shows as a token.
"""

import random
from dataclasses import dataclass, replace
from typing import Any

import pytest

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import HashedTokens, LedgerRunner, drive

VOCABULARY = 12  # small, so that EOS comes up now and then
EOS = 0


@dataclass(frozen=True)
class Request:
    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str | None
    priority: int
    arrival: int

    def sequence(self) -> Sequence:
        return Sequence(self.prompt, sampling_params=self.params, cache_salt=self.salt, priority=self.priority)


@dataclass(frozen=True)
class World:
    """A set of requests and the smallest pool in which each can run to its own end."""

    requests: tuple[Request, ...]
    block_size: int
    smallest_pool: int

    @classmethod
    def of(cls, seed: int) -> "World":
        rng = random.Random(seed)
        block_size = rng.choice([1, 2, 3, 4, 8])
        prefix = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 3 * block_size))]
        requests = []
        for _ in range(rng.randint(1, 6)):
            own = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 2 * block_size + 2))]
            params = SamplingParams(max_tokens=rng.randint(1, 10), min_tokens=0, ignore_eos=rng.random() < 0.5)
            salt = rng.choice([None, None, None, "a"])
            prompt = prefix[: rng.randint(0, len(prefix))] + own
            requests.append(Request(tuple(prompt), params, salt, rng.randint(0, 2), rng.randint(0, 8)))
        longest = max(len(request.prompt) + (request.params.max_tokens or 0) for request in requests)
        return cls(tuple(requests), block_size, -(-longest // block_size))

    def run(self, num_blocks: int, *, seats: int = 8, budget: int = 4096, warm: bool = False, **mode: Any) -> list[list[int]]:
        scheduler = Scheduler(seats, budget, num_blocks, self.block_size, EOS, **mode)
        runner = LedgerRunner.for_scheduler(scheduler, vocab_size=VOCABULARY)
        if warm:
            for request in self.requests:
                scheduler.add_sequence(replace(request, priority=0).sequence())
            drive(scheduler, runner, 5000)
        sequences = [request.sequence() for request in self.requests]
        arrivals: dict[int, list[Sequence]] = {}
        for request, seq in zip(self.requests, sequences, strict=True):
            arrivals.setdefault(request.arrival, []).append(seq)
        drive(scheduler, runner, 5000, arrivals=arrivals)
        assert scheduler.block_manager.num_free_blocks == num_blocks
        return [seq.completion_token_ids for seq in sequences]

    def worked_out(self) -> list[list[int]]:
        """What each request must get, with no engine at all."""
        answers = []
        for request in self.requests:
            tokens = HashedTokens(VOCABULARY).continue_prompt(request.prompt, request.params.max_tokens or 0)
            if EOS in tokens and not request.params.ignore_eos:
                tokens = tokens[: tokens.index(EOS) + 1]
            answers.append(tokens)
        return answers


@pytest.mark.parametrize("seed", range(300))
def test_tokens_do_not_depend_on_how_they_are_computed(seed: int) -> None:
    world = World.of(seed)
    rng = random.Random(-seed)
    roomy, tiny = 200, world.smallest_pool
    policy: Any = rng.choice(["fcfs", "priority"])
    ways: dict[str, dict[str, Any]] = {
        "alone": {"num_blocks": roomy, "seats": 1, "enable_prefix_caching": False},
        "batched": {"num_blocks": roomy},
        "mixed": {"num_blocks": roomy, "enable_chunked_prefill": True},
        "no cache": {"num_blocks": roomy, "enable_prefix_caching": False, "enable_chunked_prefill": True},
        "warm": {"num_blocks": roomy, "warm": True, "enable_chunked_prefill": rng.random() < 0.5},
        "tiny pool": {"num_blocks": tiny, "policy": policy},
        "tiny pool, mixed": {"num_blocks": tiny, "policy": policy, "enable_chunked_prefill": True, "warm": rng.random() < 0.5},
        "tiny pool, no cache": {
            "num_blocks": tiny + rng.randint(0, 2),
            "policy": policy,
            "enable_chunked_prefill": rng.random() < 0.5,
            "enable_prefix_caching": False,
        },
        "priority": {"num_blocks": roomy, "seats": rng.randint(1, 3), "policy": "priority", "enable_chunked_prefill": True},
    }
    expected = world.worked_out()
    for way, options in ways.items():
        assert world.run(**options) == expected, way


@pytest.mark.parametrize("seed", range(1000, 1030))
def test_tokens_are_equal_at_every_budget(seed: int) -> None:
    world = World.of(seed)
    expected = world.worked_out()
    for budget in range(1, 14):
        for num_blocks in (world.smallest_pool, 200):
            assert world.run(num_blocks, budget=budget, enable_chunked_prefill=True) == expected, (budget, num_blocks)


def test_the_configurations_cover_what_they_should() -> None:
    preempted = hits = ended_early = 0
    for seed in range(60):
        world = World.of(seed)
        scheduler = Scheduler(8, 4096, world.smallest_pool, world.block_size, EOS, enable_chunked_prefill=True)
        for request in world.requests:
            scheduler.add_sequence(request.sequence())
        drive(scheduler, LedgerRunner.for_scheduler(scheduler, vocab_size=VOCABULARY))
        preempted += scheduler.num_preemptions > 0
        hits += scheduler.block_manager.statistics.hit_tokens > 0
        ended_early += any(
            len(tokens) < (r.params.max_tokens or 0) for tokens, r in zip(world.worked_out(), world.requests, strict=True)
        )
    assert min(preempted, hits, ended_early) >= 10
