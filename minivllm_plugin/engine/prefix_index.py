"""Which blocks can be found again by their content: chain keys, entries, and the proof of a hit.

A part of the BlockManager, which alone calls it and decides what enters and what leaves. Knows nothing of references or of
the free queue; writes to a block only what belongs to its entry.

A block's key chains over parent key, tokens and salt; since a 64-bit key can collide, a hit also needs equal tokens and the
same parent *entry*. Entry numbers are never reused, so a child of an evicted entry cannot be mistaken for a child of its
successor.
"""

from array import array
from collections.abc import Sequence as SequenceABC
from collections.abc import Set as AbstractSet

import xxhash

from minivllm_plugin.engine.block import ROOT_ENTRY, Block
from minivllm_plugin.engine.sequence import Sequence

__all__ = ["PrefixIndex"]


class PrefixIndex:
    """The index over the blocks of one pool.

    Args:
        blocks: all of the pool, by their ids.
        block_size: tokens per block.

    Attributes:
        block_ids: key -> the block that is found under it.
    """

    def __init__(self, blocks: SequenceABC[Block], block_size: int) -> None:
        self.block_ids: dict[int, int] = {}
        self._blocks = blocks
        self._block_size = block_size
        self._entries: set[int] = set()
        self._next_entry_id = 0

    @property
    def entry_ids(self) -> AbstractSet[int]:
        """Of the entries that it holds."""
        return self._entries

    # --- keys --------------------------------------------------------------------------------------------------------

    def compute_hash(self, token_ids: SequenceABC[int], parent_key: int | None = None, salt: str | None = None) -> int:
        """64-bit chain key (xxh3) of one full block after ``parent_key``; the salt enters at the root and so in every child."""
        digest = xxhash.xxh3_64()
        if parent_key is not None:
            digest.update(parent_key.to_bytes(8, "little"))
        elif salt is not None:
            digest.update(b"salt:" + salt.encode("utf-8", "surrogatepass"))
        digest.update(array("q", token_ids).tobytes())
        return digest.intdigest()

    def key(self, seq: Sequence, index: int) -> int:
        """Of full block ``index`` of ``seq``, which keeps its keys."""
        keys = seq.block_keys
        while len(keys) <= index:
            start = len(keys) * self._block_size
            tokens = seq.token_ids[start : start + self._block_size]
            keys.append(self.compute_hash(tokens, keys[-1] if keys else None, seq.cache_salt))
        return keys[index]

    # --- looking up ----------------------------------------------------------------------------------------------------

    def find(self, seq: Sequence, most: int) -> list[Block]:
        """The longest run of entries that equals the first blocks of ``seq``, at most so many."""
        hits: list[Block] = []
        parent = ROOT_ENTRY
        for index in range(most):
            block = self.get(self.key(seq, index))
            if block is None or not self.is_equal(block, seq, index, parent):
                break
            hits.append(block)
            parent = block.entry_id
        return hits

    def count_likely(self, seq: Sequence, most: int) -> int:
        """How many blocks :meth:`find` would probably find: keys are compared, tokens are not."""
        found = 0
        while found < most and self.key(seq, found) in self.block_ids:
            found += 1
        return found

    def get(self, key: int) -> Block | None:
        """Who is found under ``key``; perhaps another block that collides."""
        block_id = self.block_ids.get(key)
        return None if block_id is None else self._blocks[block_id]

    def is_equal(self, block: Block, seq: Sequence, index: int, parent_entry: int | None) -> bool:
        """Whether an indexed block is block ``index`` of ``seq``: tokens, salt and all that came before."""
        start = index * self._block_size
        return (
            block.entry_id is not None
            and block.parent_entry == parent_entry
            and block.salt == seq.cache_salt
            and block.token_ids == tuple(seq.token_ids[start : start + self._block_size])
        )

    def is_reachable(self, parent_entry: int | None) -> bool:
        """Whether a lookup can get to a child of this entry: false once the entry is gone."""
        return parent_entry is ROOT_ENTRY or parent_entry in self._entries

    # --- entries -------------------------------------------------------------------------------------------------------

    def enter(self, block: Block, seq: Sequence, index: int) -> int:
        """Index ``block`` as block ``index`` of ``seq``, below ``seq.prefix_entry``; its key must be free. Returns the entry."""
        start = index * self._block_size
        entry_id = self._next_entry_id
        self._next_entry_id += 1
        block.key = self.key(seq, index)
        block.entry_id = entry_id
        block.parent_entry = seq.prefix_entry
        block.salt = seq.cache_salt
        block.depth = index
        block.num_hits = 0
        block.token_ids = tuple(seq.token_ids[start : start + self._block_size])
        self._entries.add(entry_id)
        self.block_ids[block.key] = block.block_id
        return entry_id

    def remove(self, block: Block) -> None:
        """Take the entry of ``block`` out."""
        assert block.key is not None
        assert block.entry_id is not None
        del self.block_ids[block.key]
        self._entries.remove(block.entry_id)
        block.key = block.entry_id = block.parent_entry = block.salt = None
        block.token_ids = ()
