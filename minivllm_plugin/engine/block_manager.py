"""The pool of KV blocks: who holds which, which are free, and which can be found again by their content.

Sole owner of reference counts, free queue and prefix index (:mod:`minivllm_plugin.engine.prefix_index`). Only the Scheduler
calls it, on the engine thread. It counts blocks; the K/V themselves are the runner's.

A block enters the index when it is full **and** computed (:meth:`BlockManager.commit`).

A freed block stays findable until it is taken for something else: oldest first, and within one sequence the deepest block
first, since a prefix is worth more than its continuation.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection
from collections.abc import Sequence as SequenceABC
from itertools import islice
from typing import Literal

from minivllm_plugin.config import check_integer
from minivllm_plugin.engine.block import CUT_CHAIN, ROOT_ENTRY, Block, PoolStatistics
from minivllm_plugin.engine.integrity import check_pool
from minivllm_plugin.engine.prefix_index import PrefixIndex
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.events import (
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlocksAllocated,
    BlocksFreed,
    BlocksHit,
    BlockStored,
)
from minivllm_plugin.views import CandidateBlock

__all__ = ["Block", "BlockManager", "PoolStatistics"]


class BlockManager:
    """Allocates blocks to sequences, shares equal prefixes, takes blocks back.

    Args:
        num_blocks: blocks in the pool, at least 1.
        block_size: tokens per block, at least 1. The one place where this number lives.
        enable_prefix_caching: False keeps every block private.

    Attributes:
        index: finds blocks by their content; read by others, changed here alone.
        log: what happens to blocks is appended here, for whoever empties it; None records nothing.
        prepare_taking: called before that many blocks are taken from the front of the free queue; may bring others to it
            (:meth:`eviction_window`, :meth:`move_to_front`). None takes the oldest.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        check_integer("num_blocks", num_blocks, at_least=1)
        check_integer("block_size", block_size, at_least=1)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.blocks = [Block(i) for i in range(num_blocks)]
        self.index = PrefixIndex(self.blocks, block_size)
        self.statistics = PoolStatistics()
        self.log: list[BlockEvent] | None = None
        self.prepare_taking: Callable[[int], None] | None = None
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._num_cached_blocks = 0
        self._num_freed = 0

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Free blocks that can still be found by their content. Counted along, so that asking costs nothing in a big pool."""
        return self._num_cached_blocks

    @property
    def free_block_ids(self) -> list[int]:
        """Free blocks in the order in which they will be taken."""
        return list(self._free)

    @property
    def hash_to_block_id(self) -> dict[int, int]:
        """Chain key -> the block that is found under it."""
        return self.index.block_ids

    @property
    def used_block_ids(self) -> set[int]:
        return {block.block_id for block in self.blocks if block.ref_count > 0}

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return (num_tokens + self.block_size - 1) // self.block_size

    def compute_hash(self, token_ids: SequenceABC[int], parent_key: int | None = None, salt: str | None = None) -> int:
        """64-bit chain key (xxh3) of one full block after ``parent_key``; the salt enters at the root and so in every child."""
        return self.index.compute_hash(token_ids, parent_key, salt)

    # --- a sequence enters ---------------------------------------------------------------------------------------

    def find_prefix(self, seq: Sequence) -> list[Block]:
        """The longest run of indexed blocks, from the first one on, that equals the start of ``seq``.

        At least one token is always left to compute: its logits are what the next token is sampled from. A sequence whose whole
        prompt is needed finds nothing.
        """
        if not self.enable_prefix_caching or seq.needs_whole_prompt:
            return []
        return self.index.find(seq, (seq.num_tokens - 1) // self.block_size)

    def can_allocate(self, seq: Sequence, prefix: list[Block] | None = None, reserve: int = 0) -> bool:
        """Whether all tokens of ``seq`` can get a block now, with ``reserve`` blocks left over."""
        prefix = self.find_prefix(seq) if prefix is None else prefix
        revived = sum(1 for block in prefix if block.ref_count == 0)
        return self.blocks_needed(seq.num_tokens) - len(prefix) + revived + reserve <= len(self._free)

    def allocate(self, seq: Sequence, prefix: list[Block] | None = None) -> None:
        """Give ``seq`` blocks for all its tokens, shared ones first, and set what is already computed.

        ``prefix`` is the result of :meth:`find_prefix` with nothing allocated since. Call only if :meth:`can_allocate`.
        """
        assert not seq.block_table, "a sequence is allocated once, and again only after deallocate()"
        prefix = self.find_prefix(seq) if prefix is None else prefix
        for block in prefix:  # before any block is taken: a hit in the free queue must not be handed out as fresh
            if block.ref_count == 0:
                del self._free[block.block_id]
                self._num_cached_blocks -= 1
            block.ref_count += 1
            block.num_hits += 1
            seq.block_table.append(block.block_id)
        if prefix and self.log is not None:
            keys = tuple(seq.block_keys[: len(prefix)])
            self.log.append(BlocksHit(seq.request_id or "", tuple(seq.block_table), keys))
        self._extend(seq, self.blocks_needed(seq.num_tokens) - len(prefix))
        cached = len(prefix) * self.block_size
        seq.num_cached_tokens = seq.num_computed_tokens = cached
        seq.num_hashed_blocks = len(prefix)
        seq.prefix_entry = prefix[-1].entry_id if prefix else ROOT_ENTRY
        self.statistics.queried_tokens += seq.num_tokens
        self.statistics.hit_tokens += cached

    # --- it grows --------------------------------------------------------------------------------------------------

    def can_append(self, seq: Sequence) -> bool:
        """Whether :meth:`append` will succeed: every token of ``seq`` has a slot, or one more block is free."""
        return self.blocks_needed(seq.length) - len(seq.block_table) <= min(1, len(self._free))

    def append(self, seq: Sequence) -> None:
        """Make sure that the newest token of ``seq`` has a slot. Call only if :meth:`can_append`."""
        missing = self.blocks_needed(seq.length) - len(seq.block_table)
        assert missing <= min(1, len(self._free)), "append() without can_append()"
        if missing > 0:
            self._extend(seq, missing)

    def extend(self, seq: Sequence, num_tokens: int, *, keep_free: int) -> int:
        """Find slots for ``num_tokens`` beyond the newest token, leaving ``keep_free`` blocks free; how many there are."""
        room = len(seq.block_table) * self.block_size - seq.length
        missing = min(self.blocks_needed(num_tokens - room), len(self._free) - keep_free)
        if missing > 0:
            self._extend(seq, missing)
            room += missing * self.block_size
        return min(num_tokens, room)

    def commit(self, seq: Sequence, num_computed_tokens: int | None = None) -> None:
        """Enter the blocks of ``seq`` that are full and computed into the index. Call once their K/V are written.

        Args:
            num_computed_tokens: no more than these count; None is the sequence's own number.
        """
        if not self.enable_prefix_caching:
            return
        index = self.index
        full_blocks = (seq.num_computed_tokens if num_computed_tokens is None else num_computed_tokens) // self.block_size
        while seq.num_hashed_blocks < full_blocks and seq.prefix_entry != CUT_CHAIN:
            if not index.is_reachable(seq.prefix_entry):
                seq.prefix_entry = CUT_CHAIN  # a block that ours equals was evicted: nothing below could be found
                return
            depth = seq.num_hashed_blocks
            known = index.get(index.key(seq, depth))
            if known is not None and not index.is_reachable(known.parent_entry):
                self._forget(known, "forgotten")  # or it would keep this key from everybody for as long as it lives
                known = None
            if known is None:
                seq.prefix_entry = self._store(seq, depth)
            elif index.is_equal(known, seq, depth, seq.prefix_entry):
                # Somebody computed the same block first; ours stays private, the chain goes on from theirs.
                seq.prefix_entry = known.entry_id
            else:
                seq.prefix_entry = CUT_CHAIN  # a collision: nothing below could be verified
                return
            seq.num_hashed_blocks += 1

    # --- it leaves -------------------------------------------------------------------------------------------------

    def deallocate(self, seq: Sequence) -> None:
        """Take back all blocks of ``seq``, deepest first. Harmless when it holds none."""
        if seq.block_table and self.log is not None:
            self.log.append(BlocksFreed(seq.request_id or "", tuple(reversed(seq.block_table))))
        for block_id in reversed(seq.block_table):
            block = self.blocks[block_id]
            block.ref_count -= 1
            assert block.ref_count >= 0, f"block {block_id} released more often than held"
            if block.ref_count == 0:
                self._free[block_id] = None
                self._num_freed += 1
                block.freed_at = self._num_freed
                self._num_cached_blocks += block.key is not None
        seq.block_table.clear()
        seq.num_computed_tokens = 0
        seq.num_hashed_blocks = 0
        seq.prefix_entry = ROOT_ENTRY

    def forget(self, seq: Sequence) -> None:
        """Take the blocks of ``seq`` out of the index: what they hold is not to be trusted. It keeps them until it ends."""
        for block_id in seq.block_table:
            if self.blocks[block_id].key is not None:
                self._forget(self.blocks[block_id], "forgotten")

    def reset_prefix_cache(self) -> int:
        """Forget every indexed block; held blocks stay with their holders. Returns how many entries were dropped."""
        entries = list(self.index.block_ids.values())
        for block_id in entries:
            self._forget(self.blocks[block_id], None)
        if self.log is not None:
            self.log.append(AllBlocksCleared())
        return len(entries)

    # --- who goes first -------------------------------------------------------------------------------------------

    def count_cached_tokens(self, seq: Sequence) -> int:
        """Tokens of ``seq`` that the index probably holds (keys are compared, tokens are not): for policies, not for use."""
        if not self.enable_prefix_caching or seq.needs_whole_prompt:
            return 0
        return self.index.count_likely(seq, (seq.num_tokens - 1) // self.block_size) * self.block_size

    def eviction_window(self, size: int) -> tuple[list[int], list[CandidateBlock]]:
        """Of the ``size`` blocks freed longest ago: those that hold nothing findable, and those that do; oldest first."""
        blank: list[int] = []
        candidates: list[CandidateBlock] = []
        for block_id in islice(self._free, size):
            block = self.blocks[block_id]
            if block.key is None:
                blank.append(block_id)
            else:
                age = self._num_freed - block.freed_at
                candidates.append(CandidateBlock(block_id, block.num_hits, age, block.depth, block.salt))
        return blank, candidates

    def move_to_front(self, block_ids: SequenceABC[int]) -> None:
        """Have these free blocks taken next, the first of them first."""
        for block_id in reversed(block_ids):
            self._free.move_to_end(block_id, last=False)

    def check_integrity(self, holders: Collection[Sequence]) -> None:
        """Raise AssertionError unless counts, free queue and index agree with the block tables of ``holders``."""
        check_pool(self, holders)

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _store(self, seq: Sequence, depth: int) -> int:
        """Index block ``depth`` of ``seq``; returns the entry."""
        block = self.blocks[seq.block_table[depth]]
        entry_id = self.index.enter(block, seq, depth)
        self.statistics.stored_blocks += 1
        if self.log is not None:
            keys, parent = (seq.block_keys[depth],), seq.block_keys[depth - 1] if depth else None
            salt = () if block.salt is None else (block.salt,)
            self.log.append(BlockStored(keys, parent, block.token_ids, self.block_size, (block.block_id,), salt))
        return entry_id

    def _extend(self, seq: Sequence, num_blocks: int) -> None:
        """Give ``seq`` that many fresh blocks."""
        if not num_blocks:
            return
        if self.prepare_taking is not None:
            self.prepare_taking(num_blocks)
        seq.block_table += [self._take() for _ in range(num_blocks)]
        if self.log is not None:
            self.log.append(BlocksAllocated(seq.request_id or "", tuple(seq.block_table[-num_blocks:])))

    def _take(self) -> int:
        block_id, _ = self._free.popitem(last=False)
        block = self.blocks[block_id]
        if block.key is not None:
            self._forget(block, "evicted")
            self.statistics.evicted_blocks += 1
        block.ref_count = 1
        return block_id

    def _forget(self, block: Block, cause: Literal["evicted", "forgotten"] | None) -> None:
        """Take one entry out of the index; no ``cause``: the caller tells it himself."""
        if cause is not None and self.log is not None and block.key is not None:
            self.log.append(BlockRemoved((block.key,), (block.block_id,), cause))
        self.index.remove(block)
        self._num_cached_blocks -= block.ref_count == 0
