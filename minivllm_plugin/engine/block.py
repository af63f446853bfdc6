"""One block of the KV pool, and the pool's totals. Written by the BlockManager alone."""

from dataclasses import dataclass

__all__ = ["CUT_CHAIN", "ROOT_ENTRY", "Block", "PoolStatistics"]

ROOT_ENTRY = None
CUT_CHAIN = -1


@dataclass(slots=True)
class Block:
    """One KV block. ``entry_id`` is set exactly while the prefix index points here; ``depth`` is then its place in its chain,
    ``num_hits`` how often it was found. ``freed_at`` numbers the frees of the pool."""

    block_id: int
    ref_count: int = 0
    key: int | None = None
    entry_id: int | None = None
    parent_entry: int | None = ROOT_ENTRY
    salt: str | None = None
    token_ids: tuple[int, ...] = ()
    depth: int = 0
    num_hits: int = 0
    freed_at: int = 0


@dataclass(slots=True)
class PoolStatistics:
    """Totals since start, in tokens and blocks."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    stored_blocks: int = 0
    evicted_blocks: int = 0
