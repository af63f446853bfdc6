"""One picture of the engine as bytes, for ``GET /engine/state``: small enough for five a second, and no prompt in it.

Layout, little endian::

    u32 header length | header, JSON | state, 1 byte a block | holders, 1 byte a block | u32 block ids of each sequence, one table
    after the other, lengths in the header's ``sequences`` | u32 ids of blocks that the asking page's conversation left behind

State bytes are those of :mod:`minivllm_ui.pool_map`.
"""

import json
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Frame", "decode", "encode", "encode_ids"]


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded picture.

    Attributes:
        tables: block ids of each of ``header["sequences"]``, in their order.
        left_behind: free blocks that still hold what the asking conversation computed.
    """

    header: Mapping[str, Any]
    state: bytes
    holders: bytes
    tables: list[list[int]]
    left_behind: list[int]


def encode(header: Mapping[str, Any], state: bytes, holders: bytes, tables: Iterable[Sequence[int]]) -> bytes:
    """All but the last part, which depends on who asks."""
    text = json.dumps(header, separators=(",", ":")).encode()
    return b"".join([struct.pack("<I", len(text)), text, state, holders, *(encode_ids(table) for table in tables)])


def encode_ids(block_ids: Sequence[int]) -> bytes:
    """Block ids as u32."""
    ids = array("I", block_ids)
    assert ids.itemsize == 4
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def decode(data: bytes) -> Frame:
    """The reverse of :func:`encode` and :func:`encode_ids` together."""
    (length,) = struct.unpack_from("<I", data)
    header = json.loads(data[4 : 4 + length])
    num_blocks, start = header["num_blocks"], 4 + length
    state, holders = data[start : start + num_blocks], data[start + num_blocks : start + 2 * num_blocks]
    ids = array("I", data[start + 2 * num_blocks :])
    if sys.byteorder == "big":
        ids.byteswap()
    tables, used = [], 0
    for sequence in header["sequences"]:
        tables.append(list(ids[used : used + sequence["blocks"]]))
        used += sequence["blocks"]
    return Frame(header, state, holders, tables, list(ids[used:]))
