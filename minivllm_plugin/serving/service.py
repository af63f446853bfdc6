"""The engine thread: takes requests from any thread, runs steps, hands out progress, and dies in the open.

Owns the thread, the inbox and the outboxes' writing end. Everything that touches the engine happens on its thread; other
threads only put into the inbox. No text, no model names, no LiteLLM here.

Life: starting -> serving -> closed, or dead. Whatever ends it fails every waiter at once with the cause.
"""

import itertools
import logging
import os
import queue
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.snapshot import EngineSnapshot, take_snapshot
from minivllm_plugin.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    MinivllmError,
    ModelLoadError,
    QueueFullError,
)
from minivllm_plugin.serving.live_requests import LiveRequests, Request
from minivllm_plugin.serving.outbox import ENGINE_THREAD_PREFIX, Failed

__all__ = ["EngineService", "Lifecycle"]

logger = logging.getLogger(__name__)

SNAPSHOT_INTERVAL = 0.05  # seconds between published snapshots while busy
STEP_PATIENCE = 30.0  # seconds that an exiting interpreter waits for a step to end
LOAD_PATIENCE = 5.0  # seconds that it waits for a load: enough to read a small model's weights, not for a download

State = Literal["starting", "serving", "closed", "dead"]


@dataclass(frozen=True, slots=True)
class _Abort:
    """``request``: only this one, for its id may have ended and been taken again; None: whoever has the id.
    ``choice``: only this one of its completions."""

    request_id: str
    request: Request | None = None
    choice: int | None = None


_Message = Request | _Abort | EngineError | None
"""In the inbox. An error: the engine cannot go on, as somebody beside it has noticed. None: close."""


class Lifecycle(Protocol):
    """Who is told of an engine's life. ``failed`` and ``stopped`` must not raise."""

    def started(self, service: "EngineService") -> None: ...

    def failed(self, error: BaseException) -> None: ...

    def stopped(self, error: BaseException | None) -> None: ...


class EngineService:
    """Runs an engine on a thread of its own.

    Args:
        build: makes the engine; called on the engine thread, so that all tensor work of this engine happens there (OpenMP
            keeps a team of threads per calling thread).
        name: for the thread's name and for messages.
        max_unfinished: most requests accepted and not yet ended.
        lifecycle: told on the engine thread when the engine serves, dies and has stopped.
    """

    def __init__(
        self, build: Callable[[], LLMEngine], *, name: str, max_unfinished: int, lifecycle: Lifecycle | None = None
    ) -> None:
        self.name = name
        self._lifecycle = lifecycle
        self._build: Callable[[], LLMEngine] | None = build
        self._max_unfinished = max_unfinished
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._state: State = "starting"
        self._cause: BaseException | None = None
        self._snapshot: EngineSnapshot | None = None
        self._live: LiveRequests | None = None
        self._numbers = itertools.count()  # not a generator: those refuse to be advanced by two threads at once
        self._accepted: set[str] = set()
        # Guards state and accepted ids, so that a request is either in the inbox before the end of the engine, and failed
        # by it, or refused. Held for a few instructions.
        self._gate = threading.Lock()
        self._started = threading.Event()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._main, name=f"{ENGINE_THREAD_PREFIX}{name}", daemon=True)
        self._thread.start()
        weakref.finalize(self, _stop_thread, self._inbox, self._thread, self._started).atexit = True

    # --- any thread ----------------------------------------------------------------------------------------------

    @property
    def is_healthy(self) -> bool:
        """True while requests are served."""
        return self._state == "serving" and self._thread.is_alive() and os.getpid() == self._pid

    def wait_started(self) -> None:
        """Block until the engine is built; raise what building it raised."""
        self._started.wait()
        if self._cause is not None:
            if isinstance(self._cause, MinivllmError):
                raise self._cause
            if isinstance(self._cause, OSError):
                raise ModelLoadError(
                    f"{self.name!r} cannot be loaded: {self._cause}; is MINIVLLM_CACHE a writable directory?"
                ) from self._cause
            raise EngineDeadError(f"engine {self.name!r} could not start: {self._cause!r}") from self._cause

    def next_request_id(self) -> str:
        """An id that this service has not given before, and that no unfinished request was given by its caller."""
        return next(name for number in self._numbers if (name := f"request-{number}") not in self._accepted)

    def submit(self, request: Request) -> None:
        """Queue a checked request.

        Raises:
            EngineClosedError, EngineDeadError: nobody would serve it.
            QueueFullError: too many are unfinished.
            InvalidRequestError: its id is in use.
        """
        self._refuse_own_thread()
        with self._gate:
            self._raise_unless_serving()
            if request.request_id in self._accepted:
                raise InvalidRequestError(f"request id {request.request_id!r} is in use; wait for it to end or take another")
            if len(self._accepted) >= self._max_unfinished:
                raise QueueFullError(
                    f"{len(self._accepted)} requests are unfinished, the limit is {self._max_unfinished} "
                    "(max_num_sequences + max_queue_size); try again later or raise max_queue_size"
                )
            self._accepted.add(request.request_id)
            self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        """End a request before the next step, in whatever state it is. Never blocks, takes no lock, ignores unknown ids."""
        self._inbox.put(_Abort(request_id))

    def abort_request(self, request: Request, choice: int | None = None) -> None:
        """:meth:`abort` for the one who submitted it, or of one of its completions: a later request with the same id is left
        alone."""
        self._inbox.put(_Abort(request.request_id, request, choice))

    def snapshot(self) -> EngineSnapshot:
        """The state after a recent step: at most 50 ms old while busy, current while idle."""
        self.wait_started()
        assert self._snapshot is not None
        return self._snapshot

    @property
    def latest_snapshot(self) -> EngineSnapshot | None:
        """:meth:`snapshot` without waiting: None before the engine has started."""
        return self._snapshot

    def close_soon(self) -> None:
        """Ask the thread to stop, without waiting: what the owner's finaliser may do."""
        self._inbox.put(None)

    def close(self) -> None:
        """Stop the thread and fail whoever still waits with EngineClosedError. Idempotent; returns when the thread is gone.

        Raises:
            EngineError: called on that very thread, by a plugin.
        """
        self._refuse_own_thread()
        self._inbox.put(None)
        self._thread.join()

    def _raise_unless_serving(self) -> None:
        if os.getpid() != self._pid:
            raise EngineDeadError(
                f"engine {self.name!r} belongs to process {self._pid}: threads do not survive a fork; make a new one here"
            )
        if self._state == "closed":
            raise EngineClosedError(f"engine {self.name!r} is closed; make a new one")
        if self._state == "dead":
            raise self._died()

    def _died(self) -> EngineDeadError:
        error = EngineDeadError(f"engine {self.name!r} died: {self._cause!r}")
        error.__cause__ = self._cause
        return error

    def _refuse_own_thread(self) -> None:
        if threading.current_thread() is self._thread:
            raise EngineError(
                "this call came from the engine's own thread and would wait for itself; hand the work to another thread"
            )

    # --- engine thread -------------------------------------------------------------------------------------------

    def _main(self) -> None:
        lifecycle = self._lifecycle
        try:
            self._build_and_serve()
            self._end("closed", lambda: EngineClosedError(f"engine {self.name!r} was closed"))
        except BaseException as error:  # whatever it was, waiters must hear of it
            if self._state == "serving":
                logger.exception("engine %r died", self.name)
                if lifecycle is not None:
                    lifecycle.failed(error)
            _clear_frames(error)
            self._cause = error
            self._end("dead", self._died)
        finally:
            self._build = None
            try:
                if lifecycle is not None:
                    lifecycle.stopped(self._cause)
            finally:
                self._started.set()

    def _build_and_serve(self) -> None:
        # A function of its own: when it is left by an exception, its frame can be cleared, and the engine goes with it.
        assert self._build is not None
        engine = self._build()
        self._build = None
        with _closing(engine.runner):
            watch = getattr(engine.runner, "call_on_failure", None)
            if watch is not None:
                watch(self._inbox.put)
            self._snapshot = take_snapshot(engine.scheduler, engine.runner)
            if self._lifecycle is not None:
                self._lifecycle.started(self)
            self._state = "serving"
            self._started.set()
            self._live = LiveRequests(engine, self._release)
            self._serve(engine, self._live)

    def _serve(self, engine: LLMEngine, live: LiveRequests) -> None:
        published = 0.0
        while True:
            if not self._read_inbox(engine, live):
                live.abort_all()
                return
            started = time.time()
            live.deliver(engine.step(), started)
            live.expire()
            now = time.monotonic()
            if now - published > SNAPSHOT_INTERVAL:
                self._snapshot = take_snapshot(engine.scheduler, engine.runner)
                published = now

    def _read_inbox(self, engine: LLMEngine, live: LiveRequests) -> bool:
        """Take in everything that has arrived, waiting for something if there is nothing to run. False: close."""
        while True:
            if not live:
                self._snapshot = take_snapshot(engine.scheduler, engine.runner)  # current for as long as nothing happens
            try:
                message = self._inbox.get(block=not live)
            except queue.Empty:
                return True
            if message is None:
                return False
            if isinstance(message, EngineError):
                raise message
            if isinstance(message, _Abort):
                live.abort(message.request_id, message.request, message.choice)
            else:
                live.add(message)

    def _release(self, request_id: str) -> None:
        with self._gate:
            self._accepted.discard(request_id)

    def _end(self, state: State, error: Callable[[], EngineError]) -> None:
        """Fail everybody."""
        with self._gate:
            self._state = state
            self._accepted.clear()
        if self._live is not None:
            self._live.fail_all(error)
            self._live = None  # it holds the engine
        while True:  # accepted, but not yet seen by the engine
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            if isinstance(message, Request):
                message.outbox.put(Failed(error()))


def _clear_frames(error: BaseException | None) -> None:
    """Let go of the variables that an exception's traceback keeps: here they are weights and KV cache."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


@contextmanager
def _closing(runner: object) -> Iterator[None]:
    """Whichever way the block is left: a runner that holds more than memory, such as processes, has ``close()``."""
    try:
        yield
    finally:
        close = getattr(runner, "close", None)
        if close is not None:
            close()


def _stop_thread(inbox: "queue.SimpleQueue[_Message]", thread: threading.Thread, started: threading.Event) -> None:
    """At interpreter exit, or when the service is collected: tensors must not be in use while Python is taken down."""
    inbox.put(None)
    if threading.current_thread() is not thread:
        thread.join(STEP_PATIENCE if started.is_set() else LOAD_PATIENCE)
