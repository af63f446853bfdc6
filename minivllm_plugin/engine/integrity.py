"""What must hold between two calls of a Scheduler, recounted from scratch. For tests and debugging: O(pool + live sequences).

Reads and changes nothing. These are our own invariants, so a broken one is an AssertionError.
"""

from collections import Counter
from collections.abc import Collection
from typing import TYPE_CHECKING

from minivllm_plugin.engine.sequence import Sequence, SequenceStatus

if TYPE_CHECKING:
    from minivllm_plugin.engine.block_manager import BlockManager
    from minivllm_plugin.engine.scheduler import Scheduler

__all__ = ["check_pool", "check_queues"]


def check_queues(scheduler: "Scheduler") -> None:
    """Queues, live ids and statuses agree, and whoever runs has something left to compute and the blocks for it."""
    queued = [*scheduler.waiting, *scheduler.running]
    assert len({id(seq) for seq in queued}) == len(queued), "a sequence is queued twice"
    assert all(scheduler.get(seq.request_id or "") is seq for seq in queued), "a queued sequence is not live"
    assert len(queued) == scheduler.num_live_sequences, "a live sequence is in no queue"
    assert len(scheduler.running) <= scheduler.max_num_sequences, "more sequences run than allowed"
    for seq in scheduler.waiting:
        assert seq.status is SequenceStatus.WAITING, f"{seq!r} waits in another state"
        assert not seq.block_table, f"{seq!r} waits but holds blocks"
    for seq in scheduler.running:
        assert seq.status is SequenceStatus.RUNNING, f"{seq!r} runs in another state"
        assert 0 <= seq.num_computed_tokens < seq.length, f"{seq!r} has nothing left to compute"
        needed = scheduler.block_manager.blocks_needed(seq.num_computed_tokens)
        assert len(seq.block_table) >= needed, f"{seq!r} lacks blocks"


def check_pool(pool: "BlockManager", holders: Collection[Sequence]) -> None:
    """Counts, free queue and index agree with the block tables of ``holders``, who are all that hold blocks."""
    held = Counter(block_id for seq in holders for block_id in seq.block_table)
    for seq in holders:
        assert len(set(seq.block_table)) == len(seq.block_table), f"{seq!r} lists a block twice"
    index, free = pool.index, set(pool.free_block_ids)
    for block in pool.blocks:
        assert block.ref_count == held[block.block_id], f"{block} is held {held[block.block_id]} times"
        assert (block.ref_count == 0) == (block.block_id in free), f"{block} is both held and free, or neither"
        assert (block.entry_id is None) == (block.key is None), f"{block} is half indexed"
        if block.key is not None:
            assert index.block_ids.get(block.key) == block.block_id, f"{block} is not where the index looks"
            assert len(block.token_ids) == pool.block_size, f"{block} is indexed but not full"
    entries = [block.entry_id for block in pool.blocks if block.entry_id is not None]
    assert len(entries) == len(index.block_ids), "the index points at a block that forgot its key"
    assert index.entry_ids == set(entries), "the entry ids disagree with the index"
    cached = sum(1 for block_id in free if pool.blocks[block_id].key is not None)
    assert pool.num_cached_blocks == cached, f"{cached} free blocks are indexed, {pool.num_cached_blocks} are counted"
