"""Random walks over small pools: whatever callers do, in whatever order, no promise is broken.

60 walks of 250 steps. After every single call both integrity checks run, the ledger verifies every read and write, and at the
end each accepted request has ended exactly once, with a reason, and the pool is whole.
"""

import random
from collections import Counter
from typing import Any

import pytest

from minivllm_plugin.engine.prompt_lookup import PromptLookup
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import HashedTokens, LedgerRunner, RepeatingTokens, assert_invariants

NUM_WALKS, STEPS = 60, 250
VOCABULARY, EOS = 30, 0


class Loops(RepeatingTokens):
    """Few tokens, so that a completion soon repeats itself; now and then one that ends it."""

    def _after(self, token_ids: list[int]) -> int:
        token = super()._after(token_ids)
        return token if token in (EOS, 1, 5) else 6 + token % 4


class Walk:
    """One scheduler, one ledger and a random caller."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.chunked = seed % 2 == 1
        self.num_blocks = rng.randint(1, 12)
        block_size = rng.choice([1, 2, 3, 4, 8])
        self.budget = rng.choice([1, 2, 3, 5, 8, 13, 64])
        self.scheduler = Scheduler(
            rng.randint(1, 5),
            self.budget,
            self.num_blocks,
            block_size,
            EOS,
            end_token_ids=[1],
            enable_chunked_prefill=self.chunked,
            enable_prefix_caching=rng.random() < 0.8,
            policy=rng.choice(["fcfs", "priority"]),
        )
        guesses = seed % 3 == 0
        self.bustle = 0.15 if guesses else 0.4  # nothing is guessed while somebody waits
        self.scheduler.speculation = PromptLookup(rng.choice([1, 3, 7])) if guesses else None
        self.hashed = Loops(60) if guesses else HashedTokens(VOCABULARY)
        self.runner = LedgerRunner.for_scheduler(self.scheduler, choose=self.choose, can_speculate=guesses)
        self.capacity = self.num_blocks * block_size
        self.prefixes = [[rng.randrange(VOCABULARY) for _ in range(3 * block_size)] for _ in range(3)]
        self.accepted: list[Sequence] = []
        self.endings: Counter[int] = Counter()
        self.failing: set[str] = set()
        self.num_calls: Counter[str] = Counter()
        self.interferences = [self.add, self.abort, self.preempt]
        finish = self.scheduler.finish

        def counted(seq: Sequence, reason: Any) -> None:
            self.endings[id(seq)] += 1
            finish(seq, reason)

        self.scheduler.finish = counted  # type: ignore[method-assign]

    def choose(self, seq: Sequence) -> int:
        return FAILED_TOKEN if seq.request_id in self.failing and seq.num_completion_tokens == 2 else self.hashed(seq)

    def check(self, call: str) -> None:
        self.num_calls[call] += 1
        assert_invariants(self.scheduler, self.accepted)

    # --- what a caller may do ------------------------------------------------------------------------------------------

    def add(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.prefixes)[: rng.randint(0, 12)] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
        params = SamplingParams(
            max_tokens=rng.choice([1, 3, 8, 20, None]),
            min_tokens=rng.choice([0, 0, 1]),
            ignore_eos=rng.random() < 0.4,
            stop_token_ids=rng.choice([(), (), (5,)]),
        )
        name = rng.choice([None, None, f"again-{rng.randint(0, 5)}", f"request-{rng.randint(0, 99)}"])
        seq = Sequence(
            prompt,
            sampling_params=params,
            request_id=name,
            priority=rng.randint(-1, 2),
            cache_salt=rng.choice([None, None, "a", "b"]),
            max_model_length=rng.choice([None, None, 20]),
        )
        impossible = len(prompt) > self.capacity or (not self.chunked and len(prompt) > self.budget)
        duplicate = name is not None and self.scheduler.get(name) is not None
        try:
            self.scheduler.add_sequence(seq)
        except InvalidRequestError:
            assert impossible or duplicate
            self.check("refused")
        else:
            assert not impossible
            assert not duplicate
            self.accepted.append(seq)
            if rng.random() < 0.05:
                self.failing.add(seq.request_id or "")
            self.check("add")

    def abort(self) -> None:
        if self.accepted:
            seq = self.rng.choice(self.accepted[-12:])
            current = self.scheduler.get(seq.request_id or "")
            assert self.scheduler.abort(seq.request_id or "") is current
            self.check("abort")

    def preempt(self) -> None:
        if self.scheduler.running:
            self.scheduler.preempt(self.rng.choice(list(self.scheduler.running)))
            self.check("preempt")

    def reset(self) -> None:
        self.scheduler.block_manager.reset_prefix_cache()
        for block_id in self.scheduler.block_manager.free_block_ids:
            self.runner.poison(block_id)  # nobody may read what was forgotten
        self.check("reset")

    def add_again(self) -> None:
        if self.accepted:
            with pytest.raises(InvalidRequestError):
                self.scheduler.add_sequence(self.rng.choice(self.accepted))
            self.check("add again")

    def step(self) -> None:
        rng = self.rng
        batch, is_prefill = self.scheduler.schedule()
        self.check("schedule")
        assert bool(batch) != self.scheduler.is_finished()
        if rng.random() < 0.05:  # a runner that failed: the batch is dropped
            return
        if rng.random() < 0.05:
            self.interfere()
        computed = [seq for seq in batch if seq.block_table]  # without those who were aborted or preempted just now
        tokens = self.runner.run(computed, is_prefill) if computed else []
        if rng.random() < 0.1:
            self.interfere()
        lengths = {id(seq): seq.num_tokens for seq in computed}
        self.scheduler.postprocess(computed, tokens)
        self.check("postprocess")
        most = 1 if self.scheduler.speculation is None else 1 + self.scheduler.speculation.num_speculative_tokens
        assert all(seq.num_tokens <= lengths[id(seq)] + most for seq in computed)

    def interfere(self) -> None:
        self.rng.choice(self.interferences)()

    def run(self) -> None:
        actions = [self.add, self.abort, self.preempt, self.reset, self.add_again]
        for _ in range(STEPS):
            while self.rng.random() < self.bustle:
                self.rng.choices(actions, [10, 2, 1, 0.3, 0.3])[0]()
            self.step()

    def drain(self) -> None:
        self.interferences = [self.abort]
        for _ in range(20_000):
            if self.scheduler.is_finished():
                return
            self.step()
        pytest.fail(f"not drained: {self.scheduler.waiting} {self.scheduler.running}")


@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_walk(seed: int) -> None:
    walk = Walk(seed)
    walk.run()
    walk.drain()
    pool = walk.scheduler.block_manager
    assert pool.num_free_blocks == pool.num_blocks
    assert walk.num_calls["schedule"] >= STEPS
    assert set(walk.endings) == {id(seq) for seq in walk.accepted}
    assert set(walk.endings.values()) <= {1}
    for seq in walk.accepted:
        assert seq.finish_reason in ("stop", "length", "abort", "error")
        assert seq.completion_token_ids == walk.hashed.continue_prompt(seq.prompt_token_ids, seq.num_completion_tokens)


def test_the_walks_are_long_and_varied_enough() -> None:
    assert NUM_WALKS * STEPS >= 10_000
    calls: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    preemptions = hits = drafted = accepted = 0
    for seed in range(13):
        walk = Walk(seed)
        walk.run()
        walk.drain()
        calls += walk.num_calls
        reasons.update(str(seq.finish_reason) for seq in walk.accepted)
        preemptions += walk.scheduler.num_preemptions - walk.num_calls["preempt"]
        hits += walk.scheduler.block_manager.statistics.hit_tokens
        if walk.scheduler.speculation is not None:
            drafted += walk.scheduler.speculation.statistics.drafted_tokens
            accepted += walk.scheduler.speculation.statistics.accepted_tokens
    assert min(calls[name] for name in ("add", "refused", "abort", "preempt", "reset", "add again")) > 10, calls
    assert min(reasons[name] for name in ("stop", "length", "abort", "error")) > 10, reasons
    assert preemptions > 20, preemptions
    assert hits > 200, hits
    assert 10 < accepted < drafted, (accepted, drafted)
