"""vLLM's KV events on the wire: what a batch looks like in msgpack, in the form of today's vLLM and of older ones.

Pure encoding: knows no socket and no thread. Imports msgspec, and is loaded only by
:class:`~minivllm_plugin.plugins.first_party.kv_events.KVEventPublisher`.

A batch is the array ``[ts, [event, …], data_parallel_rank]``; ``ts`` is ``time.time()``. An event is a map with its name under
``type`` and vLLM's field names. Before https://github.com/vllm-project/vllm/pull/42892 (2026) it was an array, name first, then
the fields in their order. Fields without a meaning here (LoRA, cache groups) are None or left out.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from minivllm_plugin.events import AllBlocksCleared, BlockRemoved, BlockStored

__all__ = ["BatchEncoder", "EventFormat", "PublishedEvent"]

EventFormat: TypeAlias = Literal["map", "array"]
PublishedEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class _Batch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


class _Stored(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockStored"):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[str, ...] | None] | None = None  # one entry a block


class _Removed(msgspec.Struct, omit_defaults=True, gc=False, tag="BlockRemoved"):
    block_hashes: list[int]
    medium: str | None


class _Cleared(msgspec.Struct, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
    pass


class _StoredArray(_Stored, array_like=True, omit_defaults=True, gc=False, tag="BlockStored"):
    pass


class _RemovedArray(_Removed, array_like=True, omit_defaults=True, gc=False, tag="BlockRemoved"):
    pass


class _ClearedArray(_Cleared, array_like=True, omit_defaults=True, gc=False, tag="AllBlocksCleared"):
    pass


class BatchEncoder:
    """Engine events -> payload of one message.

    Args:
        event_format: ``"map"`` (vLLM today) or ``"array"`` (before).
        medium: where the blocks are, in vLLM's words.
        data_parallel_rank: which replica this is.
    """

    def __init__(self, event_format: EventFormat, medium: str, data_parallel_rank: int) -> None:
        is_map = event_format == "map"
        self._stored = _Stored if is_map else _StoredArray
        self._removed = _Removed if is_map else _RemovedArray
        self._cleared = _Cleared if is_map else _ClearedArray
        self._medium = medium
        self._rank = data_parallel_rank
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, ts: float, events: Sequence[PublishedEvent]) -> bytes:
        return self._encoder.encode(_Batch(ts, [self._wire(event) for event in events], self._rank))

    def _wire(self, event: PublishedEvent) -> msgspec.Struct:
        if isinstance(event, BlockStored):
            extra_keys = [event.extra_keys] * len(event.block_hashes) if event.extra_keys else None
            return self._stored(
                list(event.block_hashes),
                event.parent_block_hash,
                list(event.token_ids),
                event.block_size,
                None,
                self._medium,
                None,
                extra_keys,  # type: ignore[arg-type]  # lists are invariant
            )
        if isinstance(event, BlockRemoved):
            return self._removed(list(event.block_hashes), self._medium)
        return self._cleared()
