"""``trace``: a recording of an engine for Perfetto (https://ui.perfetto.dev) or chrome://tracing: steps, requests, blocks.

Owns the file and the spans that are open. Everything is written by the thread that delivers the hooks (the engine's), in pieces
of 64 KiB, and whenever the engine becomes idle; memory does not grow with the recording. No prompt, answer or metadata appears.

Tracks: process 1, the engine (steps with their phases, block events, counters); process 2, one track a request. Times are the
engine's clock in microseconds; ``otherData`` says which time of day that is.
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

from minivllm_plugin.config import check_integer
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.events import BlockEvent, RequestOutcome, StepPlan, StepReport
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins.facade import ConfigDraft, EngineHandle
from minivllm_plugin.plugins.first_party.single_engine import SingleEngine
from minivllm_plugin.plugins.first_party.trace_events import EngineTracks, RequestTrack
from minivllm_plugin.plugins.first_party.trace_file import TraceFile, open_numbered
from minivllm_plugin.views import EngineState, RequestView

__all__ = ["PATH_VARIABLE", "TraceRecorder"]

logger = logging.getLogger(__name__)

PATH_VARIABLE = "MINIVLLM_TRACE"
FLUSH_SECONDS = 1.0  # of the engine's clock: how much a crash may cost while the engine is busy
MAX_BYTES = 512 * 1024 * 1024  # about an hour at 100 steps a second and a few requests
SMALLEST_MAX_BYTES = 4096


class TraceRecorder(SingleEngine):
    """Writes a trace file from the first event to the end of the engine. The file can be opened at any time, also after a crash.

    Args:
        path: of the file, which is replaced if it exists. None takes the environment variable ``MINIVLLM_TRACE``, or
            ``minivllm-trace-<pid>-<n>.json`` in the current directory; neither replaces a file, a number is added instead.
        max_bytes: the file stops growing there; said in the log.

    Attributes:
        path: of the file; before the engine has started, the one that was asked for, or None.

    Raises:
        ConfigError: an argument is impossible; from the engine's constructor if the file cannot be written.
    """

    minivllm_name = "trace"

    def __init__(self, path: "str | os.PathLike[str] | None" = None, *, max_bytes: int = MAX_BYTES) -> None:
        if path is not None and (not isinstance(path, str | os.PathLike) or not os.fspath(path)):
            raise ConfigError(f"path must be a file name or None, got {path!r:.100}")
        self.path = None if path is None else Path(path)
        self._may_replace = path is not None
        self._max_bytes = check_integer("max_bytes", max_bytes, at_least=SMALLEST_MAX_BYTES)
        self._file: TraceFile | None = None
        self._tracks: EngineTracks | None = None
        self._requests: dict[str, RequestTrack] = {}
        self._now = 0.0  # the latest moment that the engine has told
        self._flushed = 0.0
        self._has_just_stepped = False
        self._held: Sequence[BlockEvent] = ()  # block events that came without a moment of their own

    # --- hooks -----------------------------------------------------------------------------------------------------

    @hookimpl
    def minivllm_configure(self, config: ConfigDraft) -> None:
        super().minivllm_configure(config)
        path = self.path or _default_path()
        folder = path.parent
        if path.is_dir() or not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise ConfigError(
                f"a trace cannot be written to {str(path)!r}: it must be a file in an existing folder where you may write; "
                f"give TraceRecorder another path, or set {PATH_VARIABLE}"
            )

    @hookimpl
    def minivllm_engine_started(self, engine: EngineHandle) -> None:
        super().minivllm_engine_started(engine)
        snapshot = engine.snapshot()
        self._begin(engine.name, 0.0 if snapshot is None else snapshot.now)

    @hookimpl
    def minivllm_request_queued(self, request: RequestView, state: EngineState) -> None:
        if (file := self._at(state.now)) is not None:
            self._requests[request.request_id] = RequestTrack(file, request)

    @hookimpl
    def minivllm_step_started(self, plan: StepPlan) -> None:
        if self._at(plan.state.now) is None or self._tracks is None:
            return
        self._tracks.step_started(plan)
        now = plan.state.now
        for request_id in plan.preempted:
            if (track := self._requests.get(request_id)) is not None:
                track.preempted(now)
        for request_id in (*plan.admitted, *plan.resumed):
            if (track := self._requests.get(request_id)) is not None:
                track.scheduled(now)

    @hookimpl
    def minivllm_step_finished(self, report: StepReport) -> None:
        if (file := self._at(report.state.now)) is None or self._tracks is None:
            return
        self._tracks.step_finished(report)
        for request_id in report.request_ids:
            if (track := self._requests.get(request_id)) is not None and not track.has_first_token:
                track.first_token(report.state.now)
        self._has_just_stepped = True
        is_idle = not report.state.num_running and not report.state.num_waiting
        if report.state.now - self._flushed > FLUSH_SECONDS and not is_idle:  # idle: what ends the requests comes first
            file.flush()
            self._flushed = report.state.now

    @hookimpl
    def minivllm_blocks_changed(self, events: Sequence[BlockEvent]) -> None:
        if self._tracks is None:
            return
        if self._has_just_stepped:
            self._has_just_stepped = False
            self._tracks.blocks_changed(events, self._now)
        else:  # an abort, which says its moment next
            self._held = events

    @hookimpl
    def minivllm_request_finished(self, request: RequestView, outcome: RequestOutcome) -> None:
        if (file := self._at(outcome.finished_time)) is None:
            return
        track = self._requests.pop(request.request_id, None)
        if track is None:  # rejected: it was never queued
            RequestTrack.rejected(file, request, outcome.finished_time)
        else:
            track.finished(outcome)
        if not self._requests:  # nothing may follow for hours
            file.flush()

    @hookimpl
    def minivllm_engine_error(self, error: BaseException, plan: StepPlan | None) -> None:
        if self._tracks is not None:
            self._tracks.died(error, plan, self._now)
            self._end_requests(f"engine died: {type(error).__name__}")

    @hookimpl
    def minivllm_engine_stopped(self, engine: EngineHandle, error: BaseException | None) -> None:
        if engine is not self._handle or self._file is None:
            return
        self._end_requests("engine stopped")
        self._file.close()
        if self._file.num_dropped:
            logger.warning("%d events did not fit into trace %s; raise max_bytes", self._file.num_dropped, self._file.path)
        self._tracks = None

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _begin(self, name: str, now: float) -> None:
        if self._may_replace and self.path is not None:
            self.path = self.path.absolute()
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_BINARY", 0), 0o644)
        else:
            descriptor, self.path = open_numbered(_default_path())
        offset = time.time() - time.monotonic()
        about = {"model": name, "pid": os.getpid(), "unix_time_of_ts_zero": offset}
        self._file = TraceFile(descriptor, self.path, about, self._max_bytes)
        self._tracks = EngineTracks(self._file, name)
        self._file.flush()
        self._now = self._flushed = now

    def _at(self, now: float) -> TraceFile | None:
        """Note the moment, and give block events that waited for one to it. None: nothing is recorded (any more)."""
        file = self._file
        if file is None or file.is_closed or self._tracks is None:
            return None
        self._now = now
        self._has_just_stepped = False
        if self._held:
            self._tracks.blocks_changed(self._held, now)
            self._held = ()
        return file

    def _end_requests(self, because: str) -> None:
        for track in self._requests.values():
            track.cut_off(because, self._now)
        self._requests.clear()
        if self._file is not None:
            self._file.flush()


def _default_path() -> Path:
    """Where to write when nobody said it; ``{n}`` is a number."""
    default = f"minivllm-trace-{os.getpid()}-{{n}}.json"
    wanted = os.environ.get(PATH_VARIABLE, "").strip()
    if not wanted:
        return Path.cwd() / default
    path = Path(wanted).absolute()
    return path / default if path.is_dir() else path
