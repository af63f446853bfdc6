"""How a long transfer is shown: a bar on a terminal, two plain lines elsewhere, nothing when switched off. Writes to stderr."""

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.progress import Progress

__all__ = ["TransferProgress", "announce"]


class TransferProgress:
    """One transfer of ``total`` bytes. Used as a context manager by one thread."""

    def __init__(self, title: str, total: int, *, enabled: bool) -> None:
        self.title = title
        self.total = total
        self.enabled = enabled
        self._bar: Progress | None = None
        self._started = 0.0

    def __enter__(self) -> Self:
        self._started = time.monotonic()
        if self.enabled and sys.stderr.isatty():
            self._bar = _rich_bar()
            self._bar.add_task(self.title, total=self.total)
            self._bar.start()
        else:
            announce(f"{self.title} ({self.total / 1e6:.0f} MB) ...", enabled=self.enabled)
        return self

    def update(self, done: int) -> None:
        """``done`` bytes of the whole are there now."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=min(done, self.total))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            if error is None:
                self.update(self.total)
            self._bar.stop()
        elif error is None:
            announce(f"{self.title}: done in {time.monotonic() - self._started:.1f} s", enabled=self.enabled)


def announce(line: str, *, enabled: bool) -> None:
    """One line for a person on stderr."""
    if enabled:
        print(f"minivllm: {line}", file=sys.stderr, flush=True)


def _rich_bar() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True))
