"""A thread that delivers hook calls from a bounded queue, so that a slow reader costs the engine an append.

Used for observers that turned out slow, and by plugins that know that they are. When the queue is full the oldest is
dropped and counted, like the high-water mark of a publisher.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["DeliveryThread", "QueuedObserver"]

logger = logging.getLogger(__name__)

CLOSE_PATIENCE = 5.0  # seconds that closing waits for what is queued


class DeliveryThread:
    """Runs jobs one after another on a daemon thread of its own.

    Args:
        name: of the thread.
        maxsize: most jobs queued; one more drops the oldest.

    Attributes:
        num_dropped: jobs that were dropped.
        num_errors: jobs that raised; the first one is logged.
    """

    def __init__(self, name: str, maxsize: int = 1024) -> None:
        self.num_dropped = 0
        self.num_errors = 0
        self._name = name
        self._jobs: deque[Callable[[], Any]] = deque()
        self._maxsize = maxsize
        self._wake: queue.SimpleQueue[bool] = queue.SimpleQueue()  # True: there are jobs; False: end
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[], Any]) -> None:
        """Queue ``job``; never blocks. For one putting thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._deliver, name=f"minivllm-plugin-{self._name}", daemon=True)
            self._thread.start()
        while len(self._jobs) >= self._maxsize:
            try:
                self._jobs.popleft()
            except IndexError:  # the reader was faster
                break
            self.num_dropped += 1
        self._jobs.append(job)
        self._wake.put(True)

    def close(self) -> None:
        """Deliver what is queued, for at most 5 seconds, and end the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._wake.put(False)
            if threading.current_thread() is not thread:
                thread.join(CLOSE_PATIENCE)

    def _deliver(self) -> None:
        while self._wake.get():
            try:
                job = self._jobs.popleft()
            except IndexError:  # dropped meanwhile
                continue
            try:
                job()
            except BaseException:  # also SystemExit: nobody would deliver the rest
                self.num_errors += 1
                if self.num_errors == 1:
                    logger.exception("plugin %s failed on its own thread; later errors are only counted", self._name)


class QueuedObserver:
    """Base of observers that do slow things: implement hooks that call ``self.defer(function, *arguments)``.

    ``function`` then runs on a thread of this object. Call :meth:`close` in ``minivllm_engine_stopped``.

    Args:
        maxsize: most calls waiting; one more drops the oldest and counts it in :attr:`num_dropped`.
    """

    def __init__(self, *, maxsize: int = 1024) -> None:
        self._delivery = DeliveryThread(type(self).__name__, maxsize)

    @property
    def num_dropped(self) -> int:
        """Calls that were dropped because the thread could not keep up."""
        return self._delivery.num_dropped

    def defer(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have ``function(*arguments)`` called on this observer's thread. Never blocks."""
        self._delivery.put(lambda: function(*arguments))

    def close(self) -> None:
        """Deliver what waits, for at most 5 seconds, and end the thread."""
        self._delivery.close()
