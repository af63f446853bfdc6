"""Running many requests to their ends for one blocking caller: window, order, progress bar, clean exit."""

import time
from collections import deque
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from minivllm_plugin.errors import QueueFullError
from minivllm_plugin.serving.outputs import RequestOutput
from minivllm_plugin.serving.stream import RequestStream

__all__ = ["run_all"]

FULL_QUEUE_PAUSE = 0.01  # seconds between tries while other callers fill the queue


def run_all(jobs: Sequence[Callable[[], RequestStream]], *, progress: bool) -> list[RequestOutput]:
    """Submit all jobs, as many at a time as the queue takes, and return their outputs in order.

    An exception, KeyboardInterrupt included, aborts what is still running.
    """
    waiting = deque(jobs)
    running: deque[RequestStream] = deque()
    outputs: list[RequestOutput] = []
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
                tokens += sum(len(completion.token_ids) for completion in output.outputs)
                bar.update(task, advance=1, speed=f"{tokens / max(time.monotonic() - started, 1e-9):.0f} tok/s")
        finally:
            for stream in running:
                stream.close()
    return outputs


def _submit(job: Callable[[], RequestStream], running: deque[RequestStream]) -> bool:
    try:
        running.append(job())
    except QueueFullError:
        return False
    return True


def _bar(shown: bool) -> Progress:
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[speed]}"))
    return Progress(*columns, console=Console(stderr=True), disable=not shown)
