"""What must hold between any two calls of a scheduler, recounted from scratch.

Reads public state only and changes nothing. Costs O(pool + live sequences), so it is for tests and debugging.
"""

from collections import Counter
from collections.abc import Iterable

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence, SequenceStatus

__all__ = ["InvariantError", "assert_invariants", "check_pool"]


class InvariantError(AssertionError):
    """The engine, or a plugin that drives it, broke a promise; the message says which."""


def check_pool(scheduler: Scheduler) -> None:
    """Every block is free or used, held as often as it is counted, and every live sequence is in exactly one queue.

    Raises:
        InvariantError: naming the block or the sequence.
        AssertionError: from the scheduler's own ``check_integrity()``.
    """
    pool = scheduler.block_manager
    free, used = pool.free_block_ids, pool.used_block_ids
    every_id = set(range(pool.num_blocks))
    if len(free) != len(set(free)):
        raise InvariantError(f"a block is free twice: {free}")
    if set(free) & used:
        raise InvariantError(f"blocks {sorted(set(free) & used)} are free and used")
    if set(free) | used != every_id:
        raise InvariantError(f"blocks {sorted(every_id - set(free) - used)} are neither free nor used")
    queued = [*scheduler.waiting, *scheduler.running]
    held = Counter(block_id for seq in queued for block_id in seq.block_table)
    for block in pool.blocks:
        if block.ref_count != held[block.block_id]:
            raise InvariantError(f"{block} is in {held[block.block_id]} block tables")
    if len({seq.request_id for seq in queued}) != len(queued) or len(queued) != scheduler.num_live_sequences:
        raise InvariantError(f"queues hold {[seq.request_id for seq in queued]}, {scheduler.num_live_sequences} are live")
    if len(scheduler.running) > scheduler.max_num_sequences:
        raise InvariantError(f"{len(scheduler.running)} sequences run, the limit is {scheduler.max_num_sequences}")
    scheduler.check_integrity()


def assert_invariants(scheduler: Scheduler, sequences: Iterable[Sequence]) -> None:
    """:func:`check_pool`, and each of ``sequences`` (all that were ever accepted) waits, runs, or has ended with a reason.

    Raises:
        InvariantError: a sequence was lost, ended without a reason, or has ended but holds blocks.
    """
    check_pool(scheduler)
    places = {id(seq): SequenceStatus.WAITING for seq in scheduler.waiting}
    places |= {id(seq): SequenceStatus.RUNNING for seq in scheduler.running}
    for seq in sequences:
        if places.get(id(seq), SequenceStatus.FINISHED) is not seq.status:
            raise InvariantError(f"{seq!r} is not where its status says")
        if (seq.finish_reason is None) == seq.is_finished:
            raise InvariantError(f"{seq!r} has finish reason {seq.finish_reason!r}")
        if seq.is_finished and seq.block_table:
            raise InvariantError(f"{seq!r} has ended but holds blocks")
