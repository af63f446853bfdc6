"""The hand-over of one request's progress from the engine thread to whoever reads it: a thread or an event loop.

The engine side only appends and signals, and never waits. The reading side takes all there is at once, so a slow reader
gets fewer, larger pieces. One reader at a time.
"""

import asyncio
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from minivllm_plugin.engine.llm_engine import RequestProgress
from minivllm_plugin.errors import EngineDeadError, EngineError, InvalidRequestError
from minivllm_plugin.serving.outputs import RequestMetrics

__all__ = ["ENGINE_THREAD_PREFIX", "Ended", "Failed", "Item", "Outbox"]

ENGINE_THREAD_PREFIX = "minivllm-engine-"


@dataclass(frozen=True, slots=True)
class Ended:
    """The last item of a request that ended by itself or was aborted."""

    progress: RequestProgress


@dataclass(frozen=True, slots=True)
class Failed:
    """The last item of a request that failed; raised at the reader."""

    error: Exception


Item = RequestProgress | Ended | Failed


class _Bell:
    """One wait of a reader. Rung at most once; a late ring of an earlier wait cannot silence the next one."""

    __slots__ = ("only_at_end", "ring", "rung")

    def __init__(self, ring: Callable[[], object], only_at_end: bool) -> None:
        self.ring = ring
        self.only_at_end = only_at_end
        self.rung = False


class Outbox:
    """Items of one request, in order, and what is known of it at this moment.

    Args:
        on_lost_reader: called when the reader's event loop turns out to be closed.

    Attributes:
        metrics: replaced whole by the engine thread, always before the item that it belongs to is put.
        num_cached_tokens: prompt tokens found in the prefix cache; known when the first item is put.
    """

    __slots__ = ("_bell", "_items", "_on_lost_reader", "_pid", "metrics", "num_cached_tokens")

    def __init__(self, on_lost_reader: Callable[[], None]) -> None:
        self.metrics = RequestMetrics(arrival_time=time.time())
        self.num_cached_tokens = 0
        self._items: deque[Item] = deque()
        self._bell: _Bell | None = None
        self._on_lost_reader = on_lost_reader
        self._pid = os.getpid()

    # --- engine thread -----------------------------------------------------------------------------------------

    def put(self, item: Item) -> None:
        """Append and wake the reader; never blocks."""
        self._items.append(item)
        bell = self._bell
        if bell is None or bell.rung or (bell.only_at_end and isinstance(item, RequestProgress)):
            return
        bell.rung = True
        try:
            bell.ring()
        except RuntimeError:  # call_soon_threadsafe on a closed loop: nobody will ever read this
            self._on_lost_reader()

    # --- reader ------------------------------------------------------------------------------------------------

    def take(self) -> list[Item]:
        """All items there are now, perhaps none."""
        items: list[Item] = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def put_back(self, item: Item) -> None:
        """Return one item to the front, to be taken next."""
        self._items.appendleft(item)

    def wait(self, timeout: float | None, *, for_end: bool = False) -> list[Item]:
        """Block until there is something, with ``for_end`` the last thing, and take it all; at most ``timeout`` seconds.

        Raises:
            InvalidRequestError: somebody else is waiting; one of the two would never hear of the end.
            EngineDeadError: this is a forked child, where nobody puts anything any more.
            EngineError: this is an engine's thread, in a hook: while it waits, nothing is put.
        """
        ready = threading.Event()
        bell = self._hang(_Bell(ready.set, for_end))
        try:
            if self._nothing_worth_waking(for_end):
                ready.wait(timeout)
        finally:
            self._take_down(bell)
        return self.take()

    async def wait_async(self, *, for_end: bool = False) -> list[Item]:
        """The same for a coroutine; cancellation leaves the outbox as it is. Timeouts are the caller's."""
        loop = asyncio.get_running_loop()
        ready = asyncio.Event()
        bell = self._hang(_Bell(lambda: loop.call_soon_threadsafe(ready.set), for_end))
        try:
            if self._nothing_worth_waking(for_end):
                await ready.wait()
        finally:
            self._take_down(bell)
        return self.take()

    def _hang(self, bell: _Bell) -> _Bell:
        if os.getpid() != self._pid:
            raise EngineDeadError(
                f"this stream belongs to process {self._pid}: threads do not survive a fork; make a new LLM here"
            )
        if threading.current_thread().name.startswith(ENGINE_THREAD_PREFIX):
            raise EngineError(
                "this call came from an engine's own thread and would wait for itself; hand the work to another thread"
            )
        if self._bell is not None:
            raise InvalidRequestError("another thread or task is reading this stream; it has one reader at a time")
        self._bell = bell
        return bell

    def _take_down(self, bell: _Bell) -> None:
        if self._bell is bell:  # not that of a reader who came after one whose event loop was stopped in mid-wait
            self._bell = None

    def _nothing_worth_waking(self, for_end: bool) -> bool:
        # Looked at after the bell is hung, so an item that came before is seen here and one that comes later rings.
        if not self._items:
            return True
        return for_end and isinstance(self._items[-1], RequestProgress)
