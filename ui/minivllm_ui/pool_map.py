"""Which block is free, reusable, held by whom: the engine's block events, folded one by one. Any one thread.

Knows block ids and request ids, no tokens and no text. Keeps one byte a block, repainted where an event touched it, so that a
picture costs a copy and never a walk over the pool.
"""

import time
from collections.abc import Callable, Iterable

from minivllm_plugin.events import (
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlocksAllocated,
    BlocksFreed,
    BlocksHit,
    BlockStored,
)

__all__ = ["CACHED", "FREE", "HELD", "NUM_SLOTS", "SHARED", "BlockDetails", "PoolMap"]

FREE, CACHED, SHARED, HELD = 0, 1, 2, 3
"""Values of a state byte. ``HELD + slot``: held by one request, the one in that slot."""
NUM_SLOTS = 250

BlockDetails = dict[str, object]


class PoolMap:
    """The pool of one engine.

    Args:
        slot_of: request id -> its slot, 0 to 249: a colour and a letter.

    Attributes:
        state: one byte a block, see :data:`FREE`.
        num_holders: one byte a block, at most 255.
        tables: request id -> its blocks in the order of its tokens.
        counts: blocks free, cached, shared, held by one; sums to the pool's size.
        last_holder: block id -> who held it last, empty for nobody.
    """

    def __init__(self, num_blocks: int, block_size: int, slot_of: Callable[[str], int]) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.state = bytearray(num_blocks)
        self.num_holders = bytearray(num_blocks)
        self.counts = [num_blocks, 0, 0, 0]
        self.tables: dict[str, list[int]] = {}
        self.last_holder: list[str] = [""] * num_blocks
        self.num_evicted = 0
        self._slot_of = slot_of
        self._holders: list[list[str]] = [[] for _ in range(num_blocks)]
        self._hashes: list[int | None] = [None] * num_blocks
        self._changed_at = [time.time()] * num_blocks

    def apply(self, event: BlockEvent) -> None:
        """Take in one event; they must come in the engine's order."""
        if isinstance(event, BlocksAllocated | BlocksHit):
            self._hold(event.request_id, event.block_ids)
        elif isinstance(event, BlocksFreed):
            self._let_go(event)
        elif isinstance(event, BlockStored):
            self._hashes[event.block_ids[0]] = event.block_hashes[0]
            self._paint(event.block_ids)
        elif isinstance(event, BlockRemoved):
            self.num_evicted += len(event.block_ids) if event.cause == "evicted" else 0
            self._forget(event.block_ids)
        elif isinstance(event, AllBlocksCleared):
            self._forget(range(self.num_blocks))

    def holders(self, block_id: int) -> list[str]:
        """Requests that hold it now."""
        return list(self._holders[block_id])

    def is_findable(self, block_id: int) -> bool:
        """Whether a later request with the same start would find it."""
        return self._hashes[block_id] is not None

    def details(self, block_id: int) -> BlockDetails:
        """One block in words and numbers: ``hash`` are the first 8 hex digits of its chain key, ``age`` seconds since anything
        happened to it."""
        key = self._hashes[block_id]
        return {
            "block": block_id,
            "holders": self.holders(block_id),
            "last_holder": self.last_holder[block_id],
            "hash": None if key is None else f"{key:016x}"[:8],
            "age": round(time.time() - self._changed_at[block_id], 1),
        }

    def _hold(self, request_id: str, block_ids: tuple[int, ...]) -> None:
        for block_id in block_ids:
            self._holders[block_id].append(request_id)
            self.last_holder[block_id] = request_id
        self.tables.setdefault(request_id, []).extend(block_ids)
        self._paint(block_ids)

    def _let_go(self, event: BlocksFreed) -> None:
        for block_id in event.block_ids:
            self._holders[block_id].remove(event.request_id)
        self.tables.pop(event.request_id, None)
        self._paint(event.block_ids)

    def _forget(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            self._hashes[block_id] = None
        self._paint(block_ids)

    def _paint(self, block_ids: Iterable[int]) -> None:
        now = time.time()
        for block_id in block_ids:
            holders = self._holders[block_id]
            if len(holders) > 1:
                value = SHARED
            elif holders:
                value = HELD + self._slot_of(holders[0]) % NUM_SLOTS
            else:
                value = FREE if self._hashes[block_id] is None else CACHED
            self.counts[min(self.state[block_id], HELD)] -= 1
            self.counts[min(value, HELD)] += 1
            self.state[block_id] = value
            self.num_holders[block_id] = min(len(holders), 255)
            self._changed_at[block_id] = now
