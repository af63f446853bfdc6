"""Running many requests to their ends for one blocking caller: window, order, progress bar, clean exit."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from minivllm_plugin.errors import QueueFullError

__all__ = ["Handle", "run_all"]

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

FULL_QUEUE_PAUSE = 0.01  # seconds between tries while other callers fill the queue


class Handle(Protocol[T_co]):
    """A submitted request, of whatever kind."""

    def result(self) -> T_co: ...

    def close(self) -> None: ...


def run_all(jobs: Sequence[Callable[[], Handle[T]]], *, progress: bool, tokens_of: Callable[[T], int]) -> list[T]:
    """Submit all jobs, as many at a time as the queue takes, and return their outputs in order. ``tokens_of`` feeds the bar.

    An exception, KeyboardInterrupt included, aborts what is still running.
    """
    waiting = deque(jobs)
    running: deque[Handle[T]] = deque()
    outputs: list[T] = []
    tokens = 0
    with _bar(progress and bool(jobs)) as bar:
        task = bar.add_task("", total=len(jobs), speed="")
        started = time.monotonic()
        try:
            while waiting or running:
                while waiting and _submit(waiting[0], running):
                    waiting.popleft()
                if not running:
                    time.sleep(FULL_QUEUE_PAUSE)
                    continue
                output = running.popleft().result()
                outputs.append(output)
                tokens += tokens_of(output)
                bar.update(task, advance=1, speed=f"{tokens / max(time.monotonic() - started, 1e-9):.0f} tok/s")
        finally:
            for stream in running:
                stream.close()
    return outputs


def _submit(job: Callable[[], Handle[T]], running: deque[Handle[T]]) -> bool:
    try:
        running.append(job())
    except QueueFullError:
        return False
    return True


def _bar(shown: bool) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[speed]}"))
    return Progress(*columns, console=Console(stderr=True), disable=not shown)
