"""Block events, folded one by one, always equal the pool: index, parents, tokens and who holds what."""

import random
from collections import Counter
from typing import Any

import pytest

from minivllm_plugin.engine.block_manager import BlockManager
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.events import (
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlocksAllocated,
    BlocksFreed,
    BlocksHit,
    BlockStored,
)
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import FoldedBlocks, HashedTokens, InvariantError, LedgerRunner, assert_invariants

NUM_WALKS, STEPS = 60, 150
VOCABULARY = 6  # few tokens: prompts and completions meet again and again


class Walk:
    """A scheduler whose pool keeps a log, and a folder that hears of it alone."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        block_size = rng.choice([1, 2, 3])
        self.scheduler = Scheduler(
            rng.randint(1, 5),
            rng.choice([4, 8, 32]),
            rng.randint(3, 14),
            block_size,
            0,
            enable_chunked_prefill=seed % 2 == 1,
            enable_prefix_caching=seed % 10 != 9,
            policy=rng.choice(["fcfs", "priority"]),
        )
        self.pool = self.scheduler.block_manager
        self.pool.log = []
        if seed % 3 == 0:  # keys that collide: nearly every lookup meets somebody else's block
            index: Any = self.pool.index
            index.compute_hash = lambda tokens, parent=None, salt=None: sum(tokens) % 3
        self.collides = seed % 3 == 0
        self.hashed = HashedTokens(VOCABULARY)
        self.runner = LedgerRunner.for_scheduler(self.scheduler, choose=self.choose)
        self.folded = FoldedBlocks()
        self.accepted: list[Sequence] = []
        self.kinds: Counter[str] = Counter()

    def choose(self, seq: Sequence) -> int:
        return FAILED_TOKEN if seq.priority == 7 and seq.num_completion_tokens == 2 else self.hashed(seq)

    def check(self) -> None:
        assert self.pool.log is not None
        for event in self.pool.log:
            self.folded.apply(event)
            self.kinds[type(event).__name__ + getattr(event, "cause", "")] += 1
        self.pool.log.clear()
        assert_invariants(self.scheduler, self.accepted)
        if self.collides:  # a made-up key is no digest of parent and tokens
            assert {key: entry.block_id for key, entry in self.folded.index.items()} == self.pool.hash_to_block_id
        else:
            self.folded.assert_equals(self.pool)
        held = {
            block_id: Counter(seq.request_id for seq in self.scheduler.running if block_id in seq.block_table)
            for block_id in range(self.pool.num_blocks)
        }
        assert {block_id: held_by for block_id, held_by in self.folded.holders.items() if held_by} == {
            block_id: held_by for block_id, held_by in held.items() if held_by
        }

    def add(self) -> None:
        rng = self.rng
        most = min(self.pool.num_blocks * self.pool.block_size, self.scheduler.max_num_batched_tokens)
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, min(most, 9)))]
        params = SamplingParams(max_tokens=rng.choice([1, 4, 12]), ignore_eos=True)
        salt = rng.choice([None, None, None, "a"])
        seq = Sequence(prompt, sampling_params=params, cache_salt=salt, priority=rng.choice([0, 1, 7]))
        self.scheduler.add_sequence(seq)
        self.accepted.append(seq)

    def run(self) -> None:
        rng, scheduler = self.rng, self.scheduler
        for _ in range(STEPS):
            while rng.random() < 0.4 and len(scheduler.waiting) < 20:
                self.add()
            if rng.random() < 0.1 and self.accepted:
                scheduler.abort(rng.choice(self.accepted[-6:]).request_id or "")
                self.check()
            if rng.random() < 0.05 and scheduler.running:
                scheduler.preempt(rng.choice(list(scheduler.running)))
                self.check()
            if rng.random() < 0.03:
                self.pool.reset_prefix_cache()
                self.check()
            batch, is_prefill = scheduler.schedule()
            self.check()
            if not batch:
                continue
            if rng.random() < 0.05:
                scheduler.abort(rng.choice(batch).request_id or "")
                self.check()
            batch = [seq for seq in batch if not seq.is_finished]
            scheduler.postprocess(batch, self.runner.run(batch, is_prefill) if batch else [])
            self.check()


@pytest.mark.parametrize("seed", range(NUM_WALKS))
def test_the_events_equal_the_pool(seed: int) -> None:
    Walk(seed).run()


def test_the_walks_meet_every_kind_of_event() -> None:
    kinds: Counter[str] = Counter()
    for seed in range(20):
        walk = Walk(seed)
        walk.run()
        kinds += walk.kinds
    expected = ("BlocksAllocated", "BlocksHit", "BlocksFreed", "BlockStored", "AllBlocksCleared")
    assert min(kinds[name] for name in (*expected, "BlockRemovedevicted", "BlockRemovedforgotten")) > 20, kinds


def test_an_orphan_that_is_replaced_is_told_of() -> None:
    """A child whose parent was evicted stays in the index, where nobody finds it, until its key is stored anew."""
    pool = BlockManager(6, 2)
    pool.log = []
    folded = FoldedBlocks()

    def run(tokens: list[int], name: str) -> Sequence:
        seq = Sequence(tokens, request_id=name)
        pool.allocate(seq)
        seq.num_computed_tokens = seq.num_tokens
        pool.commit(seq)
        return seq

    first = run([1, 2, 3, 4, 5], "a")
    child = first.block_table[1]
    pool.deallocate(first)
    pool.move_to_front([0])  # as a policy might: the root goes first
    other = run([9, 9], "b")
    assert other.block_table == [0]
    pool.deallocate(run([1, 2, 3, 4, 5], "c"))
    removed = [event for event in pool.log if isinstance(event, BlockRemoved)]
    assert (child,) in [event.block_ids for event in removed if event.cause in ("forgotten", "evicted")]
    for event in pool.log:
        folded.apply(event)
    folded.assert_equals(pool)


def test_events_carry_parents_tokens_and_salts() -> None:
    pool = BlockManager(4, 2)
    pool.log = []
    seq = Sequence([1, 2, 3, 4, 5], request_id="a", cache_salt="s")
    pool.allocate(seq)
    seq.num_computed_tokens = 5
    pool.commit(seq)
    first, second = seq.block_keys[:2]
    assert pool.log == [
        BlocksAllocated("a", (0, 1, 2)),
        BlockStored((first,), None, (1, 2), 2, (0,), ("s",)),
        BlockStored((second,), first, (3, 4), 2, (1,), ("s",)),
    ]
    assert second == pool.compute_hash([3, 4], first)


def test_nothing_is_recorded_when_nobody_listens() -> None:
    scheduler = Scheduler(2, 16, 8, 4, 0)
    scheduler.add_sequence(Sequence([1, 2, 3, 4, 5]))
    scheduler.schedule()
    scheduler.block_manager.reset_prefix_cache()
    assert scheduler.block_manager.log is None


HELD = BlocksAllocated("a", (0, 1))
STORED = BlockStored((7,), None, (1, 2), 2, (0,))
IMPOSSIBLE: dict[str, tuple[list[BlockEvent], BlockEvent]] = {
    "allocated twice": ([HELD], BlocksAllocated("b", (1,))),
    "allocated while indexed": ([HELD, STORED, BlocksFreed("a", (1, 0))], BlocksAllocated("b", (0,))),
    "hit of nothing": ([HELD], BlocksHit("b", (0,), (7,))),
    "hit elsewhere": ([HELD, STORED], BlocksHit("b", (1,), (7,))),
    "hit twice": ([HELD, STORED], BlocksHit("a", (0,), (7,))),
    "freed by a stranger": ([HELD], BlocksFreed("b", (0,))),
    "freed twice": ([HELD, BlocksFreed("a", (0,))], BlocksFreed("a", (0,))),
    "stored by nobody": ([], STORED),
    "stored twice": ([HELD, STORED], BlockStored((7,), None, (1, 2), 2, (1,))),
    "two keys in a block": ([HELD, STORED], BlockStored((8,), None, (1, 2), 2, (0,))),
    "half full": ([HELD], BlockStored((7,), None, (1,), 2, (0,))),
    "without its parent": ([HELD], BlockStored((7,), 6, (1, 2), 2, (0,))),
    "removed twice": ([HELD, STORED, BlockRemoved((7,), (0,))], BlockRemoved((7,), (0,))),
    "removed after all": ([HELD, STORED, AllBlocksCleared()], BlockRemoved((7,), (0,))),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_the_folder_refuses_what_cannot_be(name: str) -> None:
    before, event = IMPOSSIBLE[name]
    folded = FoldedBlocks()
    for one in before:
        folded.apply(one)
    with pytest.raises(InvariantError, match="cannot be"):
        folded.apply(event)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda pool: pool.hash_to_block_id.pop(next(iter(pool.hash_to_block_id))),
        lambda pool: setattr(pool.blocks[0], "token_ids", (9, 9)),
        lambda pool: setattr(pool.blocks[0], "salt", "x"),
        lambda pool: setattr(pool.blocks[1], "ref_count", 2),
        lambda pool: setattr(pool.blocks[0], "depth", 1),
    ],
)
def test_the_folder_notices_a_pool_that_is_otherwise(spoil: Any) -> None:
    pool = BlockManager(4, 2)
    pool.log = []
    seq = Sequence([1, 2, 3], request_id="a")
    pool.allocate(seq)
    seq.num_computed_tokens = 3
    pool.commit(seq)
    folded = FoldedBlocks()
    for event in pool.log:
        folded.apply(event)
    folded.assert_equals(pool)
    spoil(pool)
    with pytest.raises(InvariantError):
        folded.assert_equals(pool)
