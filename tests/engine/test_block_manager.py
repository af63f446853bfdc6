"""The block pool by itself, as properties. The comments name the reported case: A04, A05."""

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minivllm_plugin.engine.block_manager import BlockManager
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.errors import ConfigError

TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=14)  # few ids, so that prefixes are often equal


def fill(pool: BlockManager, seq: Sequence) -> None:
    """As a scheduler does: blocks for the prompt, everything computed, full blocks entered."""
    pool.allocate(seq)
    seq.num_computed_tokens = seq.num_tokens
    pool.commit(seq)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "name"),
    [(0, 4, "num_blocks"), (-1, 4, "num_blocks"), (4, 0, "block_size"), (4, 1.5, "block_size")],
)
def test_impossible_geometry_is_refused_by_name(num_blocks: int, block_size: int, name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        BlockManager(num_blocks, block_size)


# --- room check and allocation -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block_size", "length", "num_free"), list(product([1, 2, 3, 4, 5], range(1, 18), range(3))))
def test_can_append_says_exactly_whether_append_succeeds(block_size: int, length: int, num_free: int) -> None:  # A05
    held = -(-length // block_size)
    pool = BlockManager(held + num_free, block_size, enable_prefix_caching=False)
    seq = Sequence([1] * length)
    pool.allocate(seq)
    for _ in range((num_free + 1) * block_size + 1):
        seq.append_token(1)
        fits = pool.can_append(seq)
        assert fits == (pool.blocks_needed(seq.num_tokens) <= pool.num_blocks)
        if not fits:
            with pytest.raises(AssertionError):
                pool.append(seq)
            break
        pool.append(seq)
        assert len(seq.block_table) == pool.blocks_needed(seq.num_tokens)
    else:
        pytest.fail("the pool never ran out")
    pool.check_integrity([seq])


def test_the_edge_of_a_block() -> None:  # A05
    pool = BlockManager(1, 4)
    full = Sequence([1, 2, 3, 4])
    pool.allocate(full)
    full.append_token(5)
    assert not pool.can_append(full)
    pool.deallocate(full)
    part = Sequence([1, 2, 3])
    pool.allocate(part)
    part.append_token(4)
    assert pool.num_free_blocks == 0
    assert pool.can_append(part)


@given(st.integers(1, 5), st.integers(1, 8), st.lists(TOKENS, min_size=1, max_size=6), st.booleans())
@settings(max_examples=200, deadline=None)
def test_can_allocate_says_exactly_whether_allocate_succeeds(
    block_size: int, num_blocks: int, prompts: list[list[int]], caching: bool
) -> None:
    pool = BlockManager(num_blocks, block_size, enable_prefix_caching=caching)
    held: list[Sequence] = []
    for number, prompt in enumerate(prompts):
        seq = Sequence(prompt)
        fits = pool.can_allocate(seq)
        fresh = pool.blocks_needed(seq.num_tokens) - sum(1 for block in pool.find_prefix(seq) if block.ref_count)
        assert fits == (fresh <= pool.num_free_blocks)
        assert pool.can_allocate(seq, reserve=pool.num_blocks + 1) is False
        if fits:
            fill(pool, seq)
            held.append(seq)
        pool.check_integrity(held)
        if number % 2 and held:
            pool.deallocate(held.pop(0))
            pool.check_integrity(held)
    for seq in held:
        pool.deallocate(seq)
    pool.check_integrity([])
    assert pool.num_free_blocks == num_blocks


# --- hits --------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.lists(st.tuples(TOKENS, st.sampled_from([None, "a", ""])), min_size=1, max_size=8))
@settings(max_examples=200, deadline=None)
def test_a_hit_is_the_longest_common_run_of_full_blocks(block_size: int, requests: list[tuple[list[int], str | None]]) -> None:
    pool = BlockManager(200, block_size)
    seen: list[tuple[list[int], str | None]] = []
    for tokens, salt in requests:
        seq = Sequence(tokens, cache_salt=salt)
        best = 0
        for other, other_salt in seen:
            while (
                other_salt == salt
                and (end := (best + 1) * block_size) < len(tokens)
                and end <= len(other)
                and other[:end] == tokens[:end]
            ):
                best += 1
        fill(pool, seq)
        assert seq.num_cached_tokens == best * block_size
        pool.deallocate(seq)
        seen.append((tokens, salt))


@given(st.integers(1, 4), TOKENS, TOKENS, st.lists(st.integers(1, 5), max_size=8), st.sampled_from([None, "salt"]))
@settings(max_examples=200, deadline=None)
def test_keys_depend_on_tokens_and_salt_only(
    block_size: int, prompt: list[int], completion: list[int], chunks: list[int], salt: str | None
) -> None:
    whole = BlockManager(64, block_size)
    at_once = Sequence(prompt + completion, cache_salt=salt)
    fill(whole, at_once)

    stepwise = BlockManager(64, block_size)
    seq = Sequence(prompt, cache_salt=salt)
    stepwise.allocate(seq)
    for chunk in [*chunks, len(prompt)]:
        seq.num_computed_tokens = min(len(prompt), seq.num_computed_tokens + chunk)
        stepwise.commit(seq)
    for token in completion:
        seq.append_token(token)
        stepwise.append(seq)
        seq.num_computed_tokens += 1
        stepwise.commit(seq)
    assert set(stepwise.hash_to_block_id) == set(whole.hash_to_block_id)
    assert seq.block_keys == at_once.block_keys
    assert len(whole.hash_to_block_id) == len(prompt + completion) // block_size


def test_a_block_is_entered_only_when_full_and_computed() -> None:
    pool = BlockManager(8, 4)
    seq = Sequence(list(range(10)))
    pool.allocate(seq)
    for computed, entries in ((0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (10, 2)):
        seq.num_computed_tokens = computed
        pool.commit(seq)
        assert len(pool.hash_to_block_id) == entries


def test_keys_use_parent_tokens_and_salt() -> None:
    pool = BlockManager(1, 2)
    keys = [
        pool.compute_hash([1, 2]),
        pool.compute_hash([2, 1]),
        pool.compute_hash([1, 2], 0),
        pool.compute_hash([1, 2], 1),
        pool.compute_hash([1, 2], None, "a"),
        pool.compute_hash([1, 2], None, ""),
        pool.compute_hash([1, 2], None, "\ud800"),  # a lone surrogate is still a string
    ]
    assert len(set(keys)) == len(keys)
    assert all(0 <= key < 2**64 for key in keys)
    assert BlockManager(9, 2).compute_hash([1, 2], 2**64 - 1) == pool.compute_hash([1, 2], 2**64 - 1)


# --- taking back ----------------------------------------------------------------------------------------------------------


def test_deallocate_twice_is_harmless() -> None:  # A04b
    pool = BlockManager(4, 4)
    seq = Sequence([1, 2, 3, 4, 5])
    fill(pool, seq)
    pool.deallocate(seq)
    pool.deallocate(seq)
    assert sorted(pool.free_block_ids) == [0, 1, 2, 3]
    pool.check_integrity([])


def test_a_table_that_lists_a_block_twice_is_noticed() -> None:  # A04c: allocate() and append() cannot make one
    pool = BlockManager(4, 4)
    seq = Sequence([1, 2, 3, 4, 5])
    pool.allocate(seq)
    seq.block_table[1] = seq.block_table[0]
    with pytest.raises(AssertionError, match="lists a block twice"):
        pool.check_integrity([seq])
    with pytest.raises(AssertionError, match="released more often than held"):
        pool.deallocate(seq)


def test_blocks_come_back_deepest_first_behind_those_that_were_free_before() -> None:
    pool = BlockManager(5, 2)
    seq = Sequence([1, 2, 3, 4, 5])
    fill(pool, seq)
    assert pool.free_block_ids == [3, 4]
    table = list(seq.block_table)
    pool.deallocate(seq)
    assert pool.free_block_ids == [3, 4, *reversed(table)]


def test_statistics_count_tokens_and_blocks() -> None:
    pool = BlockManager(3, 2)
    for _ in range(2):
        seq = Sequence([1, 2, 3, 4, 5])
        fill(pool, seq)
        pool.deallocate(seq)
    statistics = pool.statistics
    assert (statistics.queried_tokens, statistics.hit_tokens) == (10, 4)
    assert (statistics.stored_blocks, statistics.evicted_blocks) == (2, 0)
    fill(pool, Sequence([9] * 6))
    assert statistics.evicted_blocks == 2
