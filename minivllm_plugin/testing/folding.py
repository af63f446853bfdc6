"""The pool as somebody sees it who hears of block events only: folded one by one, checked at every event."""

from collections import Counter
from dataclasses import dataclass

from minivllm_plugin.engine.block_manager import BlockManager
from minivllm_plugin.events import (
    AllBlocksCleared,
    BlockEvent,
    BlockRemoved,
    BlocksAllocated,
    BlocksFreed,
    BlocksHit,
    BlockStored,
)
from minivllm_plugin.testing.invariants import InvariantError

__all__ = ["FoldedBlock", "FoldedBlocks"]


@dataclass(frozen=True, slots=True)
class FoldedBlock:
    """One entry of the prefix index, as its BlockStored told it."""

    block_id: int
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    extra_keys: tuple[str, ...]


class FoldedBlocks:
    """What block events add up to, from an engine's first event on.

    Attributes:
        index: chain key -> the block that holds it.
        holders: block -> ids of the requests that hold it, each once.
    """

    def __init__(self) -> None:
        self.index: dict[int, FoldedBlock] = {}
        self.holders: dict[int, Counter[str]] = {}

    def apply(self, event: BlockEvent) -> None:
        """Take in one event.

        Raises:
            InvariantError: it cannot follow those before it.
        """
        match event:
            case BlocksAllocated(request_id, block_ids):
                for block_id in block_ids:
                    self._require(not self.holders.get(block_id), event, f"block {block_id} is held")
                    self._require(block_id not in self._indexed(), event, f"block {block_id} is still indexed")
                    self._hold(block_id, request_id, event)
            case BlocksHit(request_id, block_ids, block_hashes):
                for block_id, key in zip(block_ids, block_hashes, strict=True):
                    found = self.index.get(key)
                    self._require(found is not None and found.block_id == block_id, event, f"{key} is not in block {block_id}")
                    self._hold(block_id, request_id, event)
            case BlocksFreed(request_id, block_ids):
                for block_id in block_ids:
                    held = self.holders.get(block_id, Counter())
                    self._require(held[request_id] == 1, event, f"{request_id!r} does not hold block {block_id}")
                    del held[request_id]
            case BlockStored(block_hashes, parent, token_ids, block_size, block_ids, extra_keys):
                self._require(len(block_hashes) == len(block_ids) == 1, event, "one block an event")
                self._require(len(token_ids) == block_size, event, "a block that is not full")
                self._require(block_hashes[0] not in self.index, event, "its key is in the index already")
                self._require(block_ids[0] not in self._indexed(), event, "its block is in the index already")
                self._require(bool(self.holders.get(block_ids[0])), event, "nobody holds its block")
                self._require(parent is None or parent in self.index, event, "its parent is not in the index")
                self.index[block_hashes[0]] = FoldedBlock(block_ids[0], parent, token_ids, extra_keys)
            case BlockRemoved(block_hashes, block_ids, _):
                for key, block_id in zip(block_hashes, block_ids, strict=True):
                    found = self.index.pop(key, None)
                    self._require(found is not None and found.block_id == block_id, event, f"{key} is not in block {block_id}")
            case AllBlocksCleared():
                self.index.clear()

    def assert_equals(self, pool: BlockManager) -> None:
        """Raise InvariantError unless index, parents, tokens and reference counts are those of ``pool``."""
        if {key: entry.block_id for key, entry in self.index.items()} != pool.hash_to_block_id:
            raise InvariantError(f"the events fold into {self.index}, the index is {pool.hash_to_block_id}")
        for key, entry in self.index.items():
            block = pool.blocks[entry.block_id]
            salt = () if block.salt is None else (block.salt,)
            if (entry.token_ids, entry.extra_keys) != (block.token_ids, salt):
                raise InvariantError(f"the events say {entry} of {block}")
            salt_of_root = block.salt if block.depth == 0 else None
            is_cut = entry.parent_block_hash is None and block.depth > 0
            if is_cut or pool.compute_hash(block.token_ids, entry.parent_block_hash, salt_of_root) != key:
                raise InvariantError(f"parent {entry.parent_block_hash} and tokens of {block} do not make its key {key}")
        for block in pool.blocks:
            if self.holders.get(block.block_id, Counter()).total() != block.ref_count:
                raise InvariantError(f"the events fold into {self.holders.get(block.block_id)} as holders of {block}")

    def _hold(self, block_id: int, request_id: str, event: BlockEvent) -> None:
        held = self.holders.setdefault(block_id, Counter())
        self._require(request_id not in held, event, f"{request_id!r} holds block {block_id} already")
        held[request_id] = 1

    def _indexed(self) -> set[int]:
        return {entry.block_id for entry in self.index.values()}

    def _require(self, holds: bool, event: BlockEvent, what: str) -> None:
        if not holds:
            raise InvariantError(f"{event} cannot be: {what}")
