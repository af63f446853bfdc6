"""What goes through the pipes between rank 0 and the others: frames, answers, and a batch as a few arrays.

A pipe is private to two processes, so nothing here is authenticated. One frame a step to each rank; nothing comes back in a
step. Standard library only.
"""

import json
from array import array
from dataclasses import dataclass
from typing import IO

from minivllm_plugin.runner.rows import LogitRows
from minivllm_plugin.runner.step_layout import StepLayout

__all__ = ["Answer", "decode_layout", "encode_layout", "read_frame", "write_frame"]

LENGTH_BYTES = 4
COUNTS = 4  # of the header: sequences, tokens, wanted rows, blocks of all tables together


def write_frame(pipe: IO[bytes], payload: bytes) -> None:
    """
    Raises:
        OSError: nobody reads any more.
    """
    pipe.write(len(payload).to_bytes(LENGTH_BYTES, "little") + payload)
    pipe.flush()


def read_frame(pipe: IO[bytes]) -> bytes | None:
    """The next frame, waited for; None when the other side has closed the pipe."""
    header = pipe.read(LENGTH_BYTES)
    if len(header) < LENGTH_BYTES:
        return None
    length = int.from_bytes(header, "little")
    payload = pipe.read(length)
    return payload if len(payload) == length else None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a rank says while it starts.

    Attributes:
        num_blocks: KV blocks that it has room for, once it has loaded.
        error: name of the class in :mod:`minivllm_plugin.errors` that it failed with; ``message``: and its text.
    """

    num_blocks: int = 0
    error: str = ""
    message: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps([self.num_blocks, self.error, self.message]).encode()

    @classmethod
    def from_bytes(cls, payload: bytes) -> "Answer":
        return cls(*json.loads(payload))


def encode_layout(layout: StepLayout) -> bytes:
    """What a rank other than 0 needs of a batch: 32-bit numbers, and the slots in 64 bits."""
    assert not layout.sources, "tokens that only rank 0 has"
    rows = layout.wanted.rows
    widths = [len(table) for table in layout.block_tables]
    counts = [len(layout.query_lens), len(layout.token_ids), len(rows), sum(widths)]
    numbers = array("i")
    for part in (counts, list(layout.query_lens), list(layout.seq_lens), widths, layout.token_ids, layout.positions, rows):
        numbers.fromlist(part)
    for table in layout.block_tables:
        numbers.fromlist(table)  # of hundreds of long sequences the most of it, and several times faster than one by one
    return numbers.tobytes() + array("q", layout.slots).tobytes()


def decode_layout(payload: bytes) -> StepLayout:
    """The batch again, without what rank 0 alone does with it."""
    counts = array("i", payload[: COUNTS * 4])
    num_seqs, num_tokens, num_rows, num_blocks = counts
    end = (COUNTS + 3 * num_seqs + 2 * num_tokens + num_rows + num_blocks) * 4
    numbers = array("i", payload[COUNTS * 4 : end]).tolist()
    slots = array("q", payload[end:]).tolist()
    sections, start = [], 0
    for length in (num_seqs, num_seqs, num_seqs, num_tokens, num_tokens, num_rows):
        sections.append(numbers[start : start + length])
        start += length
    query_lens, seq_lens, widths, token_ids, positions, rows = sections
    tables = []
    for width in widths:
        tables.append(numbers[start : start + width])
        start += width
    return StepLayout(token_ids, positions, slots, [], tuple(query_lens), tuple(seq_lens), tables, LogitRows.of_rows(rows))
