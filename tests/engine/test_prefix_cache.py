"""What is found again is what was computed: hits, misses, sharing, eviction and collisions, seen through a scheduler.

The comments name the reported case each test grew from: B01 to B08.
"""

from collections.abc import Callable
from typing import Any

import pytest

from minivllm_plugin.engine.block_manager import BlockManager
from minivllm_plugin.engine.prefix_index import PrefixIndex
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import BatchRecord, HashedTokens, LedgerRunner, ScriptedTokens, check_pool, drive

EOS = 0
BLOCK_SIZES = [1, 2, 3, 4, 8, 16]

RunAll = Callable[..., list[BatchRecord]]


def request(tokens: list[int], max_tokens: int = 1, salt: str | None = None, request_id: str | None = None) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return Sequence(tokens, sampling_params=params, cache_salt=salt, request_id=request_id)


def expected(seq: Sequence) -> list[int]:
    return HashedTokens(1000).continue_prompt(seq.prompt_token_ids, seq.num_completion_tokens)


class Warm:
    """A scheduler and a ledger that live on between requests."""

    def __init__(self, num_blocks: int, block_size: int = 4, budget: int = 256, **mode: Any) -> None:
        self.scheduler = Scheduler(8, budget, num_blocks, block_size, EOS, **mode)
        self.runner = LedgerRunner.for_scheduler(self.scheduler)

    def run(self, *seqs: Sequence) -> list[int]:
        """Run them together to their ends; how many tokens each found."""
        for seq in seqs:
            self.scheduler.add_sequence(seq)
        drive(self.scheduler, self.runner)
        for seq in seqs:
            assert seq.completion_token_ids == expected(seq)
        return [seq.num_cached_tokens for seq in seqs]


# --- whole prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("length", [1, 2, 3, 4, 8, 9, 16, 17])
def test_a_prompt_that_is_wholly_cached_computes_one_token_at_least(length: int, block_size: int, chunked: bool) -> None:  # B01
    warm = Warm(64, block_size, enable_chunked_prefill=chunked)
    tokens = list(range(1, length + 1))
    cold = request(tokens, 4)
    warm.run(cold)
    neighbour, again = request([90, 91, 92], 4), request(tokens, 4)
    cached = warm.run(neighbour, again)
    assert cached[1] == (length - 1) // block_size * block_size < length
    assert again.completion_token_ids == cold.completion_token_ids != neighbour.completion_token_ids


def test_the_reported_lengths() -> None:  # B01
    for length, hit in ((8, 4), (4, 0), (9, 8)):
        warm = Warm(64)
        warm.run(request(list(range(1, length + 1))))
        assert warm.run(request([90, 91, 92]), request(list(range(1, length + 1)))) == [0, hit]


def test_without_caching_nothing_is_found_or_kept() -> None:
    warm = Warm(64, enable_prefix_caching=False)
    for _ in range(2):
        assert warm.run(request(list(range(1, 30)))) == [0]
    assert not warm.scheduler.block_manager.hash_to_block_id


# --- sharing -----------------------------------------------------------------------------------------------------------


def test_a_shared_block_lives_as_long_as_its_last_holder() -> None:  # B02
    pool = BlockManager(4, 4)
    x, y, z = Sequence([1, 2, 3, 4, 5]), Sequence([1, 2, 3, 4, 5]), Sequence([6] * 8)
    pool.allocate(x)
    x.num_computed_tokens = 5
    pool.commit(x)
    pool.allocate(y)
    shared = y.block_table[0]
    assert x.block_table[0] == shared
    assert pool.blocks[shared].ref_count == 2
    pool.deallocate(x)
    assert pool.blocks[shared].ref_count == 1
    assert shared not in pool.free_block_ids
    pool.allocate(z)
    assert shared not in z.block_table
    pool.check_integrity([y, z])


def test_a_block_is_shared_only_once_it_has_been_computed() -> None:
    warm = Warm(64)
    assert warm.run(request(list(range(1, 14)), 3), request(list(range(1, 14)), 3)) == [0, 0]  # both new in one batch
    mixed = Warm(64, budget=4, enable_chunked_prefill=True)
    first, second = request(list(range(1, 14)), 3), request(list(range(1, 14)), 3)
    mixed.scheduler.add_sequence(first)
    drive(mixed.scheduler, mixed.runner, arrivals={2: [second]})
    assert second.num_cached_tokens == 12
    assert second.completion_token_ids == first.completion_token_ids == expected(first)


def test_full_last_blocks_and_partial_blocks() -> None:  # B04
    seq = Sequence(list(range(1, 9)), 4)
    assert (seq.block(0), seq.block(1), seq.last_block_num_tokens) == ([1, 2, 3, 4], [5, 6, 7, 8], 4)
    with pytest.raises(IndexError, match="block 2 of a sequence with 2 blocks"):
        seq.block(2)
    with pytest.raises(IndexError):
        seq.block(-1)
    warm = Warm(64)
    first, second = request([1, 2, 3, 4, 5, 6], 3), request([1, 2, 3, 4, 5, 6], 3)
    warm.scheduler.add_sequence(first)
    batch, is_prefill = warm.scheduler.schedule()
    warm.scheduler.postprocess(batch, warm.runner.run(batch, is_prefill))
    assert len(warm.scheduler.block_manager.hash_to_block_id) == 1
    warm.scheduler.add_sequence(second)
    batch, is_prefill = warm.scheduler.schedule()
    assert second.num_cached_tokens == 4
    assert first.block_table[0] == second.block_table[0]
    assert first.block_table[1] != second.block_table[1]
    warm.scheduler.postprocess(batch, warm.runner.run(batch, is_prefill))
    drive(warm.scheduler, warm.runner)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_keys_are_equal_however_the_block_was_filled(block_size: int) -> None:  # B04
    prompt = list(range(1, 3 * block_size + 2))
    whole = Warm(64, block_size)
    seq = request(prompt, 2 * block_size + 1)
    whole.run(seq)
    everything = seq.token_ids
    assert len(whole.scheduler.block_manager.hash_to_block_id) == (len(everything) - 1) // block_size
    by_prefill, by_chunks = Warm(64, block_size), Warm(64, block_size, budget=3, enable_chunked_prefill=True)
    for other in (by_prefill, by_chunks):
        other.run(request(everything[:-1]))
    keys = [set(warm.scheduler.block_manager.hash_to_block_id) for warm in (whole, by_prefill, by_chunks)]
    assert keys[0] == keys[1] == keys[2]
    assert by_chunks.run(request(everything)) == whole.run(request(everything))


@pytest.mark.parametrize("chunked", [False, True])
def test_salts_keep_equal_prompts_apart(chunked: bool) -> None:
    warm = Warm(64, enable_chunked_prefill=chunked)
    prompt = list(range(1, 14))
    assert warm.run(request(prompt, salt="alice")) == [0]
    assert warm.run(request(prompt), request(prompt, salt="bob"), request(prompt, salt="")) == [0, 0, 0]
    for salt in ("alice", "bob", "", None):
        assert warm.run(request(prompt, salt=salt)) == [12]


# --- eviction ----------------------------------------------------------------------------------------------------------


def test_the_deepest_block_goes_first() -> None:  # B07
    warm = Warm(3)
    x = list(range(1, 10))
    warm.run(request(x))
    warm.run(request([50, 51, 52]))
    assert warm.run(request(x)) == [8]
    warm.run(request([60, 61, 62]))
    warm.run(request([70, 71, 72]))
    assert warm.run(request(x)) == [4]


def test_the_oldest_sequence_goes_first() -> None:
    warm = Warm(6)
    old, recent = list(range(1, 10)), list(range(20, 29))
    warm.run(request(old))
    warm.run(request(recent))
    warm.run(request([50, 51, 52, 53, 54]))
    assert warm.run(request(recent)) == [8]
    assert warm.run(request(old))[0] < 8


def test_a_hit_makes_a_prefix_young_again() -> None:
    warm = Warm(6)
    first, second = list(range(1, 10)), list(range(20, 29))
    warm.run(request(first))
    warm.run(request(second))
    warm.run(request(first))
    warm.run(request([50, 51, 52, 53, 54]))
    assert warm.run(request(first)) == [8]


def test_no_hit_counts_after_a_miss() -> None:  # B07
    warm = Warm(8)
    x = list(range(1, 14))
    warm.run(request(x))
    pool = warm.scheduler.block_manager
    probe = Sequence(x, 4)
    head = pool.find_prefix(probe)[0]
    pool._forget(head, "forgotten")
    assert len(pool.hash_to_block_id) == 2
    assert pool.find_prefix(Sequence(x, 4)) == []
    assert warm.run(request(x)) == [0]


def test_children_of_an_evicted_block_do_not_come_back_with_its_successor_but_give_way() -> None:
    warm = Warm(8)
    x = list(range(1, 14))
    warm.run(request(x))
    pool = warm.scheduler.block_manager
    pool._forget(pool.find_prefix(Sequence(x, 4))[0], "forgotten")
    # Computed anew: its second and third block meet entries under their keys that nobody can reach any more.
    assert warm.run(request(x)) == [0]
    assert warm.run(request(x)) == [12]
    check_pool(warm.scheduler)


def test_a_chain_whose_twin_was_evicted_is_not_continued_in_the_index() -> None:
    pool = BlockManager(5, 2)
    x, y = Sequence([1, 2, 3]), Sequence([1, 2, 3])
    for seq in (x, y):  # both computed side by side: x enters the index, y keeps a copy of its own
        pool.allocate(seq)
    for seq in (x, y):
        seq.num_computed_tokens = 2
        pool.commit(seq)
    assert y.prefix_entry == x.prefix_entry
    pool.deallocate(x)
    other = Sequence([7, 7, 7, 7, 7, 7])
    pool.allocate(other)  # takes what x left, also the indexed block
    y.append_token(4)
    y.num_computed_tokens = 4
    pool.commit(y)
    pool.check_integrity([y, other])
    assert not pool.hash_to_block_id
    pool.deallocate(y)
    assert pool.find_prefix(Sequence([1, 2, 3, 4, 5])) == []


def test_reset_forgets_everything_but_disturbs_nobody() -> None:
    warm = Warm(32)
    x = list(range(1, 14))
    running = request(x, 8)
    warm.scheduler.add_sequence(running)
    batch, is_prefill = warm.scheduler.schedule()
    warm.scheduler.postprocess(batch, warm.runner.run(batch, is_prefill))
    assert warm.scheduler.block_manager.reset_prefix_cache() == 3
    check_pool(warm.scheduler)
    assert warm.run(request(x)) == [0]
    assert running.completion_token_ids == expected(running)
    assert warm.run(request(x)) == [12]
    assert warm.scheduler.block_manager.reset_prefix_cache() > 0
    assert warm.scheduler.block_manager.reset_prefix_cache() == 0


@pytest.mark.parametrize("chunked", [False, True])
def test_what_a_failed_request_computed_is_not_offered_to_others(chunked: bool) -> None:
    warm = Warm(32, enable_chunked_prefill=chunked)
    warm.runner.choose = ScriptedTokens({"bad": [5, FAILED_TOKEN]}, HashedTokens(1000))
    x = list(range(1, 14))
    bad, neighbour = request(x, 8, request_id="bad"), request([50, 51], 8)
    warm.scheduler.add_sequence(bad)
    warm.scheduler.add_sequence(neighbour)
    drive(warm.scheduler, warm.runner)
    assert (bad.finish_reason, bad.completion_token_ids) == ("error", [5])
    assert neighbour.completion_token_ids == expected(neighbour)
    assert warm.run(request(x)) == [0]
    assert warm.run(request(x)) == [12]


# --- collisions ----------------------------------------------------------------------------------------------------------

A, B, C, D = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12], [13, 14, 15, 16]


def force_keys(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    honest = PrefixIndex.compute_hash

    def colliding(self: PrefixIndex, token_ids: Any, parent_key: int | None = None, salt: str | None = None) -> int:
        first_level = parent_key is None
        if kind == "all" or (kind == "first") == first_level:
            return 7
        return honest(self, token_ids, parent_key, salt)

    monkeypatch.setattr(PrefixIndex, "compute_hash", colliding)


def test_a_hit_needs_the_same_parent_and_not_only_an_equal_key(monkeypatch: pytest.MonkeyPatch) -> None:  # B05
    force_keys(monkeypatch, "second")
    warm = Warm(32)
    warm.run(request([*A, *D, 9]))
    warm.run(request([*C, *B, 9]))
    assert warm.run(request([*A, *B, 9])) == [4]
    assert warm.run(request([*A, *D, 9])) == [8]


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("kind", ["first", "second", "all"])
def test_collisions_cost_hits_but_never_tokens(monkeypatch: pytest.MonkeyPatch, kind: str, chunked: bool) -> None:  # B05
    force_keys(monkeypatch, kind)
    for num_blocks in (4, 6, 32):
        warm = Warm(num_blocks, budget=16, enable_chunked_prefill=chunked)
        for first in (A, B, C, D, A):
            for second in (D, B, A, B):
                warm.run(request([*first, *second, 9], 3), request([*second, *first, 9], 3, salt="s"))


def test_a_key_is_free_again_after_its_block_was_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    force_keys(monkeypatch, "all")
    warm = Warm(2)
    warm.run(request([*A, 1]))
    assert warm.run(request([*A, 1])) == [4]
    warm.run(request([*B, 1, 2, 3, 4]))  # the whole pool: A is gone, and the one key goes to B
    assert warm.run(request([*A, 1])) == [0]
    assert warm.run(request([*A, 1])) == [4]
    check_pool(warm.scheduler)


# --- resumed prefill --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [9, 14])
@pytest.mark.parametrize("budget", [5, 64])
def test_a_warm_run_computes_only_the_rest_at_its_true_positions(length: int, budget: int) -> None:  # B08
    warm = Warm(64, budget=budget, enable_chunked_prefill=True)
    tokens = list(range(1, length + 1))
    cold = request(tokens, 6)
    warm.run(cold)
    again = request(tokens, 6, request_id="again")
    warm.scheduler.add_sequence(again)
    batches = drive(warm.scheduler, warm.runner)
    cached = (length - 1) // 4 * 4
    computed = [row.num_computed for batch in batches for row in batch.rows]
    assert again.num_cached_tokens == cached == computed[0]
    assert sum(batch.num_tokens for batch in batches) == length - cached + 5  # the last token is never computed
    assert again.completion_token_ids == cold.completion_token_ids


@pytest.mark.parametrize("chunked", [False, True])
def test_preempted_and_resumed_from_its_own_blocks(chunked: bool) -> None:  # B08
    warm = Warm(64, enable_chunked_prefill=chunked)
    seq = request(list(range(1, 10)), 9)
    warm.scheduler.add_sequence(seq)
    for step in range(9):
        batch, is_prefill = warm.scheduler.schedule()
        warm.scheduler.postprocess(batch, warm.runner.run(batch, is_prefill))
        if step in (2, 5):
            tokens = seq.num_computed_tokens
            warm.scheduler.preempt(seq)
            assert len(warm.scheduler.block_manager.find_prefix(seq)) == tokens // 4
    assert seq.is_finished
    assert (seq.completion_token_ids, seq.prompt_cached_tokens) == (expected(seq), 0)
