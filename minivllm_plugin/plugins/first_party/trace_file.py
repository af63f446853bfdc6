"""A file of trace events that is valid JSON after every write, however the process ends.

Chrome's trace event format, JSON object form, as Perfetto and chrome://tracing read it. Each write replaces the closing brackets
by new events and the brackets again, in one call. Owns the file and what is not yet written; knows no engine. One thread.
"""

import json
import os
from pathlib import Path
from typing import Any

__all__ = ["TraceFile", "microseconds", "open_numbered"]

CLOSING = b"\n]}\n"
PENDING_BYTES = 64 * 1024


def microseconds(seconds: float) -> str:
    """A time as JSON number in the format's unit. Rounded to nanoseconds as an integer, so that spans that touch, touch."""
    nanoseconds = round(seconds * 1e9)
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


class TraceFile:
    """Appends events.

    Args:
        descriptor: of a file opened for writing, empty; it is closed by :meth:`close`.
        path: its name, for messages.
        about: written as ``otherData``.
        max_bytes: larger than this the file does not get.

    Attributes:
        is_full: ``max_bytes`` is reached; further events are dropped.
        num_dropped: how many were.
    """

    def __init__(self, descriptor: int, path: Path, about: dict[str, Any], max_bytes: int) -> None:
        self.path = path
        self.is_full = False
        self.num_dropped = 0
        self._file = os.fdopen(descriptor, "wb", buffering=0)
        self._max_bytes = max_bytes
        self._pending: list[str] = []
        self._pending_bytes = 0
        head = f'{{"displayTimeUnit":"ms","otherData":{json.dumps(about)},"traceEvents":[\n'.encode()
        self._end = 0  # where the next event goes, which is where the closing brackets stand
        self._is_empty = True
        self._write(head)

    def add(self, event: str) -> None:
        """One event, as JSON text; written with the next :meth:`flush`, or when 64 KiB have gathered."""
        size = len(event) + 2
        if self.is_full or self._end + self._pending_bytes + size > self._max_bytes:
            self.is_full = True
            self.num_dropped += 1
            return
        self._pending.append(event)
        self._pending_bytes += size
        if self._pending_bytes >= PENDING_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what has gathered.

        Raises:
            OSError: it could not be written, and is dropped; the file stays readable.
        """
        if not self._pending:
            return
        text = ",\n".join(self._pending)
        if not self._is_empty:
            text = ",\n" + text
        number = len(self._pending)
        self._pending.clear()
        self._pending_bytes = 0
        try:
            self._write(text.encode())
        except OSError:
            self.num_dropped += number
            raise
        self._is_empty = False

    def close(self) -> None:
        """Write the rest and close. Idempotent."""
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            self._file.close()

    @property
    def is_closed(self) -> bool:
        return self._file.closed

    def _write(self, data: bytes) -> None:
        whole = data + CLOSING
        try:
            self._file.seek(self._end)
            written = 0
            while written < len(whole):  # without a buffer, a write may be partial
                written += self._file.write(whole[written:])
        except OSError:
            self._file.truncate(self._end)
            self._file.seek(self._end)
            self._file.write(CLOSING)
            raise
        self._end += len(data)


def open_numbered(path: Path, *, begin: int = 1) -> tuple[int, Path]:
    """Create a file that did not exist: ``path``, where ``{n}`` stands for the first number that is free; else ``-2`` is added.

    Raises:
        OSError: the folder is missing or not writable.
    """
    name = path.name
    pattern = name if "{n}" in name else f"{path.stem}-{{n}}{path.suffix}"
    number = begin
    candidate = path if "{n}" not in name else path.with_name(pattern.replace("{n}", str(number)))
    while True:
        try:
            return os.open(candidate, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644), candidate
        except FileExistsError:
            number += 1
            candidate = path.with_name(pattern.replace("{n}", str(number)))
