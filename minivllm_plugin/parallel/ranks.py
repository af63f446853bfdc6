"""The further ranks of an engine as rank 0 sees them: child processes that are started, spoken to, watched and ended.

Owns the processes, their pipes and the directory where they find each other. Started, spoken to and closed on the engine thread.
Each process has two threads of its own here: one reads its standard error, one waits for its end. Knows no tensors.
"""

import contextlib
import logging
import os
import pickle
import shutil
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import minivllm_plugin.errors as errors
from minivllm_plugin.errors import ConfigError, MinivllmError, RankFailedError
from minivllm_plugin.parallel.context import LostPeerError
from minivllm_plugin.parallel.messages import Answer, read_frame, write_frame
from minivllm_plugin.parallel.plan import RankPlan

__all__ = ["Ranks"]

logger = logging.getLogger(__name__)

WORKER = "minivllm_plugin.parallel.worker"
LAST_LINES = 20  # of a rank's standard error, for the message about its end
END_SECONDS = 3.0  # for a rank to end after its pipe was closed; then it is killed
VERDICT_SECONDS = 3.0  # between a broken collective and the news whose end broke it


class _Rank:
    """One child process."""

    def __init__(self, plan: RankPlan, environment: Mapping[str, str], ended: Callable[["_Rank"], None]) -> None:
        self.rank = plan.rank
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        # A session of its own: Ctrl-C in the terminal is rank 0's to handle.
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._ended = ended
        name = f"minivllm-rank-{self.rank}"
        self._reader = threading.Thread(target=self._read_errors, name=f"{name}-stderr", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name=f"{name}-watch", daemon=True)
        self._reader.start()
        self._watcher.start()

    def send(self, payload: bytes) -> None:
        assert self.process.stdin is not None
        write_frame(self.process.stdin, payload)

    def receive(self) -> bytes | None:
        assert self.process.stdout is not None
        return read_frame(self.process.stdout)

    def end(self) -> None:
        """Have it end, and return when it has, and when both threads have."""
        _hang_up(self.process)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
        if threading.current_thread() is not self._watcher:  # which may be the last to let go of an engine
            self._watcher.join()
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with contextlib.suppress(ValueError, OSError):  # closed meanwhile
            for line in self.process.stderr:
                text = line.decode(errors="replace").rstrip()
                self.last_lines.append(text)
                logger.info("rank %d: %s", self.rank, text)

    def _watch(self) -> None:
        self.process.wait()
        self._reader.join(1.0)  # its last words; a process that it started may hold the pipe longer
        self._ended(self)


class Ranks:
    """All ranks but the first.

    Args:
        plan: rank 0's.
        num_threads: of torch, in each of the processes.

    Raises:
        ConfigError: no process can be started.
    """

    def __init__(self, plan: RankPlan, num_threads: int) -> None:
        self._plan = plan
        self._lock = threading.Lock()
        self._failure: RankFailedError | None = None
        self._failed = threading.Event()
        self._is_closing = False
        self._on_failure: list[Callable[[RankFailedError], None]] = []
        self._ranks: list[_Rank] = []
        directory = plan.rendezvous.parent
        self._finalizer = weakref.finalize(self, _end_all, self._ranks, os.getpid(), directory)
        environment = _environment(num_threads)
        try:
            if not sys.executable:
                raise FileNotFoundError("sys.executable is empty: this Python is embedded in another program")
            for rank in range(1, plan.size):
                one = _Rank(plan.of_rank(rank), environment, _weak(self._note_end))
                self._ranks.append(one)
                with contextlib.suppress(OSError):  # it is dead already; that is noticed when its answer is waited for
                    one.send(pickle.dumps(plan.of_rank(rank)))
        except OSError as error:
            self.close()
            raise ConfigError(
                f"tensor_parallel_size={plan.size}: no process could be started for rank {len(self._ranks) + 1} "
                f"({sys.executable!r}: {error}); leave tensor_parallel_size at 1"
            ) from error

    def answers(self) -> list[Answer]:
        """One answer of each rank, waited for.

        Raises:
            MinivllmError: a rank could not go on; the error is its own.
            RankFailedError: a rank died.
        """
        answers = []
        for one in self._ranks:
            payload = one.receive()
            if payload is None:
                raise self._verdict(VERDICT_SECONDS) or RankFailedError(f"rank {one.rank} stopped answering")
            answer = Answer.from_bytes(payload)
            if answer.error:
                raise _named_error(answer.error)(f"rank {one.rank}: {answer.message}")
            answers.append(answer)
        return answers

    def broadcast(self, payload: bytes) -> None:
        """Say the same to every rank.

        Raises:
            OSError: one of them has ended. Inside :meth:`explained`, it is said which one.
        """
        for one in self._ranks:
            one.send(payload)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Whatever fails inside, or came to no end, because a rank died, is raised as the news of that.

        Raises:
            RankFailedError: with the rank, its exit code and its last words.
        """
        try:
            yield
        except Exception as error:
            is_sign = isinstance(error, LostPeerError | OSError)
            failure = self._verdict(VERDICT_SECONDS if is_sign else 0.0)
            if failure is not None:
                raise failure from error
            raise
        if self._failure is not None:  # what was computed with a rank that is gone means nothing
            raise self._failure

    def call_on_failure(self, function: Callable[[RankFailedError], None]) -> None:
        """Have ``function`` called, on a thread of this object, as soon as a rank has died; at once if one has."""
        with self._lock:
            self._on_failure.append(function)
            failure = self._failure
        if failure is not None:
            function(failure)

    def process_ids(self) -> list[int]:
        """Of the ranks from 1 on."""
        return [one.process.pid for one in self._ranks]

    def close(self) -> None:
        """End all processes; returns when they are gone. Idempotent."""
        self._is_closing = True
        self._finalizer()

    def _verdict(self, seconds: float) -> RankFailedError | None:
        """The news of a rank's end, if it is here or comes within ``seconds``."""
        self._failed.wait(seconds)
        return self._failure

    def _note_end(self, one: _Rank) -> None:
        with self._lock:
            if self._is_closing or self._failure is not None:
                return
            self._failure = RankFailedError(_describe_end(one, self._plan.size))
            functions = list(self._on_failure)
        self._failed.set()
        logger.error("%s", self._failure)
        for function in functions:
            try:
                function(self._failure)
            except Exception:  # of one of several: the others must hear of it all the same
                logger.exception("the end of rank %d could not be passed on", one.rank)


def _describe_end(one: _Rank, size: int) -> str:
    code = one.process.returncode
    how = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    words = "\n".join(one.last_lines) or "(nothing)"
    return f"rank {one.rank} of {size} (process {one.process.pid}) {how}; its last words were:\n{words}"


def _named_error(name: str) -> type[MinivllmError]:
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, MinivllmError) else RankFailedError


def _environment(num_threads: int) -> dict[str, str]:
    """Our own, with the paths that modules are found on here, and the share of the threads."""
    paths = [os.path.abspath(path) for path in sys.path if os.pathsep not in path]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(num_threads)}


def _hang_up(process: "subprocess.Popen[bytes]") -> None:
    if process.stdin is not None:
        with contextlib.suppress(OSError):  # there was something left to send, and nobody to read it
            process.stdin.close()


def _weak(method: Callable[[_Rank], None]) -> Callable[[_Rank], None]:
    """``method`` without holding on to its object: a watching thread must not keep an engine that nobody else has."""
    reference: Any = weakref.WeakMethod(method)

    def call(one: _Rank) -> None:
        found = reference()
        if found is not None:
            found(one)

    return call


def _end_all(ranks: list[_Rank], owner: int, directory: Any) -> None:
    """Also when an engine is dropped without being closed, and when the interpreter ends."""
    if os.getpid() != owner:  # a fork of rank 0 is ending: nothing here is its own
        return
    for one in ranks:
        _hang_up(one.process)
    for one in ranks:
        one.end()
    shutil.rmtree(directory, ignore_errors=True)
