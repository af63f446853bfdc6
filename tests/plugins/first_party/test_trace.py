"""The ``trace`` plugin: a file that Perfetto reads, at any time and after any end, and that says what happened."""

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from settled import settled_snapshot

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import ConfigError, EngineDeadError, RequestAbortedError, RequestRejectedError
from minivllm_plugin.events import BlocksAllocated, BlocksFreed, RequestOutcome, StepPlan, StepReport
from minivllm_plugin.plugins import Reject, hookimpl
from minivllm_plugin.plugins.facade import EngineHandle
from minivllm_plugin.plugins.first_party.trace import PATH_VARIABLE, TraceRecorder
from minivllm_plugin.plugins.first_party.trace_file import TraceFile, microseconds
from minivllm_plugin.serving.outputs import RequestOutput
from minivllm_plugin.testing import scripted_llm
from minivllm_plugin.views import EngineState, RequestView

Event = dict[str, Any]
TWO_CLOCKS = 0.1  # seconds that may pass between reading one and the other on a busy machine


class Span(NamedTuple):
    """Times in microseconds, exact. ``args`` of both ends."""

    name: str
    start: Decimal
    end: Decimal
    depth: int
    args: dict[str, Any]


class Trace:
    """A trace file, checked against the format's rules while it is read."""

    def __init__(self, path: Path) -> None:
        whole = json.loads(path.read_text(), parse_float=Decimal)
        assert set(whole) == {"displayTimeUnit", "otherData", "traceEvents"}
        self.about = whole["otherData"]
        self.events: list[Event] = whole["traceEvents"]
        self.spans: dict[tuple[int, int], list[Span]] = defaultdict(list)
        self.unfinished: list[str] = []
        self.tracks: dict[tuple[int, int], str] = {}
        self.instants: list[Event] = []
        self.counters: dict[str, list[Event]] = defaultdict(list)
        stacks: dict[tuple[int, int], list[Event]] = defaultdict(list)
        latest: dict[tuple[int, int], Decimal] = {}
        for event in self.events:
            track = event["pid"], event["tid"]
            assert all(isinstance(number, int) for number in track)
            assert isinstance(event["name"], str)
            if event["ph"] == "M":
                if event["name"] == "thread_name":
                    assert track not in self.tracks, "a track has two names"
                    self.tracks[track] = event["args"]["name"]
                continue
            assert isinstance(event["ts"], Decimal)
            if event["ph"] == "X":
                assert event["dur"] >= 0
                self.spans[track].append(Span(event["name"], event["ts"], event["ts"] + event["dur"], 0, event["args"]))
            elif event["ph"] == "B":
                assert event["ts"] >= latest.get(track, Decimal(0)), "out of order"
                latest[track] = event["ts"]
                stacks[track].append(event)
            elif event["ph"] == "E":
                assert event["ts"] >= latest[track], "out of order"
                latest[track] = event["ts"]
                begun = stacks[track].pop()
                assert begun["name"] == event["name"], "spans cross"
                args = {**begun["args"], **event["args"]}
                self.spans[track].append(Span(event["name"], begun["ts"], event["ts"], len(stacks[track]), args))
            elif event["ph"] == "C":
                assert all(isinstance(value, int | Decimal) for value in event["args"].values())
                self.counters[event["name"]].append(event)
            else:
                assert event["ph"] == "i"
                assert event["s"] in ("t", "p", "g")
                self.instants.append(event)
        self.unfinished = [event["name"] for stack in stacks.values() for event in stack]

    @property
    def steps(self) -> list[Span]:
        return [span for span in self.spans[1, 1] if span.name.startswith("step ")]

    def phases(self, step: Span) -> list[Span]:
        return [
            span
            for span in self.spans[1, 1]
            if not span.name.startswith("step ") and step.start <= span.start and span.end <= step.end
        ]

    def of(self, request_id: str) -> list[Span]:
        """The spans of one request, as they began; the outer one first."""
        (track,) = [track for track, name in self.tracks.items() if name == request_id and track[0] == 2]
        return sorted(self.spans[track], key=lambda span: (span.start, span.depth))

    def blocks(self, name: str) -> list[dict[str, Any]]:
        return [event["args"] for event in self.instants if event["cat"] == "blocks" and event["name"] == name]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run.json"


def live(recorder: object, *more: object, **options: Any) -> tuple[LLM, Any]:
    settings = {"plugins": [recorder, *more], "plugin_errors": "raise", **options.pop("options", {})}
    return scripted_llm(options=settings, **options)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def run(llm: LLM, prompts: list[list[int]], max_tokens: int = 6) -> dict[str, RequestOutput]:
    streams = [llm.submit(prompt, greedy(max_tokens)) for prompt in prompts]
    return {stream.request_id: stream.result() for stream in streams}


def test_requests_agree_with_the_outputs(path: Path) -> None:
    llm, _ = live(TraceRecorder(path))
    with llm:
        told = run(llm, [[5, 6, 7], [8] * 9, [8] * 9])
    trace = Trace(path)
    assert trace.unfinished == []
    assert {name for (pid, _), name in trace.tracks.items() if pid == 2} == set(told)
    for request_id, output in told.items():
        outer, *inner = trace.of(request_id)
        assert outer.name == f"request {request_id}"
        assert outer.args == {
            "priority": 0,
            "max_tokens": 6,
            "reason": "length",
            "prompt_tokens": len(output.prompt_token_ids),
            "completion_tokens": len(output.outputs[0].token_ids),
            "cached_tokens": output.num_cached_tokens,
            "preemptions": 0,
        }
        assert [span.name for span in inner] == ["queued", "prefill", "decode"]
        edges = [outer.start, *(edge for span in inner for edge in (span.start, span.end)), outer.end]
        assert edges[0] == edges[1]
        assert edges[2::2][:2] == edges[3::2][:2], "there is time between two stages"
        assert edges == sorted(edges)
        metrics = output.metrics
        assert metrics is not None
        wall = float(outer.start) / 1e6 + float(trace.about["unix_time_of_ts_zero"])
        # The caller's clock starts earlier (before the inbox) and stops later than the engine's.
        assert metrics.arrival_time - TWO_CLOCKS <= wall <= (metrics.first_token_time or 0) + TWO_CLOCKS
        assert float(inner[1].end - outer.start) / 1e6 <= (metrics.time_to_first_token or 0) + TWO_CLOCKS


def test_steps_are_covered_by_their_phases(path: Path) -> None:
    llm, runner = live(TraceRecorder(path))
    with llm:
        told = run(llm, [[5, 6, 7], [8] * 9])
    trace = Trace(path)
    assert len(trace.steps) == runner.num_calls
    for step in trace.steps:
        phases = trace.phases(step)
        assert [phase.name for phase in phases] == ["schedule", "plugins", "run", "postprocess"]
        assert step.start == phases[0].start
        assert step.end == phases[-1].end
        assert [phase.end for phase in phases[:-1]] == [phase.start for phase in phases[1:]]
    assert all(earlier.end <= later.start for earlier, later in itertools.pairwise(trace.steps))
    assert sum(step.args["new_tokens"] for step in trace.steps) == sum(len(o.outputs[0].token_ids) for o in told.values())
    computed = sum(batch.num_tokens for batch in runner.batches)
    assert sum(step.args["tokens"] for step in trace.steps) == computed
    assert sum(step.args["prompt_tokens"] for step in trace.steps) == 12
    for outer in (trace.of(request_id)[0] for request_id in told):
        assert any(step.start <= outer.end and outer.start <= step.end for step in trace.steps)


def test_preemptions_nest(path: Path) -> None:
    llm, _ = live(TraceRecorder(path), num_blocks=8, block_size=4)
    with llm:
        told = run(llm, [[5] * 8, [6] * 8], 10)
    trace = Trace(path)
    assert sum(output.metrics.num_preemptions for output in told.values() if output.metrics) > 0
    for request_id, output in told.items():
        preempted = [span for span in trace.of(request_id) if span.name == "preempted"]
        assert output.metrics is not None
        assert len(preempted) == output.metrics.num_preemptions == trace.of(request_id)[0].args["preemptions"]
        assert all(span.depth == 2 for span in preempted)
    assert sum(step.args["preempted"] for step in trace.steps) == sum(
        trace.of(request_id)[0].args["preemptions"] for request_id in told
    )


def test_block_events_and_counters_add_up(path: Path) -> None:
    llm, _ = live(TraceRecorder(path), num_blocks=12)
    with llm:
        told = run(llm, [[seed % 3, *range(seed, seed + 10)] for seed in range(8)])
        run(llm, [[0, *range(10)]])
        snapshot = settled_snapshot(llm)
    trace = Trace(path)
    held: dict[str, int] = defaultdict(int)
    for event in trace.instants:
        sign = {"allocated": 1, "hit": 1, "freed": -1}.get(event["name"], 0)
        if sign:
            held[event["args"]["request_id"]] += sign * event["args"]["num_blocks"]
    assert set(told) <= set(held)
    assert set(held.values()) == {0}
    indexed = len(trace.blocks("stored")) - len(trace.blocks("evicted")) - len(trace.blocks("forgotten"))
    assert trace.blocks("evicted")
    last = trace.counters["blocks"][-1]["args"]
    assert last == {"used": 0, "cached": indexed, "free": 12 - indexed}
    assert indexed == snapshot.num_cached_blocks
    assert all(sum(event["args"].values()) == 12 for event in trace.counters["blocks"])
    assert trace.counters["queues"][-1]["args"] == {"running": 0, "waiting": 0}
    assert max(event["args"]["running"] for event in trace.counters["queues"]) > 1
    assert trace.counters["tokens/s"][-1]["args"] == {"generated": 0, "computed": 0}
    assert max(event["args"]["generated"] for event in trace.counters["tokens/s"]) > 0


def test_no_word_of_a_prompt(path: Path) -> None:
    llm, runner = live(TraceRecorder(path), vocab_size=10**12)  # tokens that look like no number of the trace
    with llm:
        prompt = [987_654_321_001 + index for index in range(12)]
        stream = llm.submit(prompt, greedy(6), metadata={"user": "secret-name"}, cache_salt="pepper")
        answer = stream.result().outputs[0].token_ids
        runner.fail_on_call = runner.num_calls + 1
        with pytest.raises(EngineDeadError):
            llm.submit(prompt[:1], greedy(2)).result()
    text = path.read_text()
    long_tokens = [str(token) for token in (*prompt, *answer) if token > 10**10]
    assert len(long_tokens) > len(prompt)
    assert [word for word in ("secret-name", "pepper", "on purpose", *long_tokens) if word in text] == []


def test_an_abort_and_a_refusal(path: Path) -> None:
    class Doorkeeper:
        @hookimpl
        def minivllm_admit(self, request: Any) -> Reject | None:
            return Reject("no") if request.request_id == "refused" else None

    gate = threading.Event()
    llm, runner = live(TraceRecorder(path), options={"policies": [Doorkeeper()]}, gate=gate)
    with llm:
        stream = llm.submit([5] * 6, greedy(40), request_id="left")
        assert runner.entered.wait(20)
        with pytest.raises(RequestRejectedError):
            refused = llm.submit([5], greedy(1), request_id="refused")
            llm.abort("left")
            gate.set()
            refused.result()
        with pytest.raises(RequestAbortedError):
            stream.result()
    trace = Trace(path)
    outer = trace.of("left")[0]
    assert outer.args["reason"] == "abort"
    assert [event["args"]["request_id"] for event in trace.instants if event["name"] == "rejected"] == ["refused"]
    assert "refused" not in trace.tracks.values()
    (freed,) = [event for event in trace.instants if event["name"] == "freed"]
    assert freed["ts"] == outer.end, "what an abort frees is shown at the abort"


def test_block_events_stand_where_they_happened(path: Path) -> None:
    """They carry no moment: those of a step are told after it, those of an abort before it."""
    recorder = TraceRecorder(path)
    handle = EngineHandle("hand-made", lambda: None, lambda _: None, list)
    state = EngineState(1, 1.0, 0, 2, 8, 4, 0, 4, 4, 64, 0)
    views = [RequestView(name, index, 0.5, 0, 3, 0, 0, 0, 4, 0, 0, -1) for index, name in enumerate("ab")]
    recorder.minivllm_engine_started(handle)
    for view in views:
        recorder.minivllm_request_queued(view, state)
    recorder.minivllm_step_started(StepPlan(("a", "b"), (3, 3), (True, True), ("a", "b"), (), (), 64, state))
    recorder.minivllm_step_finished(StepReport(("a",), (7,), (), 6, 0.0, 0.25, 0.0, 0.0, state._replace(now=2.0)))
    recorder.minivllm_blocks_changed((BlocksAllocated("a", (0,)), BlocksAllocated("b", (1,))))
    for view, now in zip(views, (3.0, 4.0), strict=True):
        recorder.minivllm_blocks_changed((BlocksFreed(view.request_id, (view.arrival,)),))
        recorder.minivllm_request_finished(view, RequestOutcome("abort", None, 3, 0, 0, 0, now, 0.5, None, None))
    recorder.minivllm_engine_stopped(handle, None)
    moments = [(event["name"], event["args"]["request_id"], event["ts"] / 10**6) for event in Trace(path).instants]
    assert moments == [("allocated", "a", 2), ("allocated", "b", 2), ("freed", "a", 3), ("freed", "b", 4)]


def test_an_engine_that_dies_leaves_a_readable_file(path: Path) -> None:
    llm, _ = live(TraceRecorder(path), fail_on_call=3)
    with pytest.raises(EngineDeadError):
        llm.submit([5, 6, 7], greedy(9), request_id="victim").result()
    llm.close()
    trace = Trace(path)
    assert trace.unfinished == []
    assert len(trace.steps) == 2
    assert trace.of("victim")[0].args["reason"] == "engine died: RuntimeError"
    (died,) = [event for event in trace.instants if event["name"] == "engine died"]
    assert died["args"] == {"error": "RuntimeError", "requests": ["victim"]}


def test_a_closed_engine_ends_its_spans(path: Path) -> None:
    gate = threading.Event()
    llm, runner = live(TraceRecorder(path), gate=gate)
    stream = llm.submit([5, 6, 7], greedy(200), request_id="open")
    assert runner.entered.wait(20)
    llm._service.close_soon()  # is read when the step, which the gate holds up, is over
    gate.set()
    llm.close()
    assert Trace(path).unfinished == []
    assert Trace(path).of("open")[0].args["reason"] == "abort"
    assert stream.request_id == "open"


CHILD = """
import os, signal, sys
from minivllm_plugin import SamplingParams
from minivllm_plugin.plugins import hookimpl
from minivllm_plugin.plugins.first_party.trace import TraceRecorder
from minivllm_plugin.testing import scripted_llm

class Killer:
    @hookimpl
    def minivllm_step_finished(self, report):
        if "doomed" in report.request_ids and report.state.num_running == 1 and report.state.step > 8:
            os.kill(os.getpid(), signal.SIGKILL)

llm, _ = scripted_llm(options={"plugins": [TraceRecorder(sys.argv[1]), Killer()]})
greedy = SamplingParams(max_tokens=5, ignore_eos=True)
llm.submit([1, 2, 3], greedy, request_id="done").result()
llm.submit([1, 2, 3], SamplingParams(max_tokens=200, ignore_eos=True), request_id="doomed").result()
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")
def test_a_killed_process_leaves_a_readable_file(path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", CHILD, str(path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr
    trace = Trace(path)
    assert trace.of("done")[0].args["completion_tokens"] == 5
    assert len(trace.steps) >= 5


def test_the_file_can_be_read_while_it_grows(path: Path) -> None:
    llm, _ = live(TraceRecorder(path))
    with llm:
        assert Trace(path).events  # names of tracks, nothing else yet
        run(llm, [[5, 6, 7]])
        first = Trace(path)
        assert len(first.steps) == 6  # idle: all is written
        run(llm, [[5, 6, 7]])
        assert Trace(path).events[: len(first.events)] == first.events
        assert len(Trace(path).steps) == 12


def test_a_given_path_is_replaced(path: Path) -> None:
    path.write_text("not JSON, and longer than a trace without events" * 200)
    recorder = TraceRecorder(str(path))
    llm, _ = live(recorder)
    with llm:
        run(llm, [[5, 6, 7]])
    assert recorder.path == path
    assert Trace(path).steps


def test_by_name_every_engine_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        llm, _runner = scripted_llm(options={"plugins": ["trace"], "plugin_errors": "raise"})
        with llm:
            run(llm, [[5, 6, 7]])
    names = sorted(entry.name for entry in tmp_path.iterdir())
    assert names == [f"minivllm-trace-{os.getpid()}-{number}.json" for number in (1, 2)]
    assert all(len(Trace(tmp_path / name).steps) == 6 for name in names)


def test_the_variable_says_where_and_nothing_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.json").write_text("mine")
    folder = tmp_path / "traces"
    folder.mkdir()
    for value in (tmp_path / "a.json", tmp_path / "a.json", folder):
        monkeypatch.setenv(PATH_VARIABLE, str(value))
        llm, _ = live(TraceRecorder())
        llm.close()
    assert (tmp_path / "a.json").read_text() == "mine"
    assert Trace(tmp_path / "a-2.json").about["pid"] == Trace(tmp_path / "a-3.json").about["pid"] == os.getpid()
    assert [entry.name for entry in folder.iterdir()] == [f"minivllm-trace-{os.getpid()}-1.json"]


def test_a_full_file_stays_readable(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm, _ = live(TraceRecorder(path, max_bytes=4096))
        with llm:
            run(llm, [[5, 6, 7]], 30)
    assert path.stat().st_size <= 4096 + 10  # and the closing brackets
    assert Trace(path).steps
    assert "raise max_bytes" in caplog.text


def test_one_object_serves_one_engine(path: Path) -> None:
    recorder = TraceRecorder(path)
    llm, _ = live(recorder)
    with llm:
        run(llm, [[5, 6, 7]])
    with pytest.raises(ConfigError, match="make a new one"):
        live(recorder)
    assert Trace(path).steps, "the first engine's trace was overwritten"


@pytest.mark.parametrize("arguments", [{"path": 7}, {"path": ""}, {"max_bytes": 10}, {"max_bytes": "1 GB"}])
def test_impossible_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        TraceRecorder(**arguments)


@pytest.mark.parametrize("name", ["missing/run.json", "."])
def test_a_place_that_cannot_be_written_stops_the_start(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'trace'.*another path"):
        live(TraceRecorder(tmp_path / name))


class FullDisk:
    """A file that takes ``room`` more bytes, then refuses until it is asked for less."""

    def __init__(self, file: Any, room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        if len(data) <= 10:
            return int(self.file.write(data))
        if self.room == 0:
            raise OSError(28, "No space left on device")
        written = int(self.file.write(data[: self.room]))
        self.room -= written
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_full_disk_costs_events_but_not_the_file(path: Path) -> None:
    file = TraceFile(os.open(path, os.O_WRONLY | os.O_CREAT), path, {}, 10**6)
    event = '{{"ph":"i","s":"t","pid":1,"tid":1,"ts":{},"name":"x","args":{{}}}}'
    file.add(event.format("1.000"))
    file.flush()
    whole = file._file
    file._file = FullDisk(whole, 20)  # type: ignore[assignment]
    file.add(event.format("2.000"))
    with pytest.raises(OSError, match="No space"):
        file.flush()
    assert [entry["ts"] for entry in Trace(path).events] == [1]
    assert file.num_dropped == 1
    file._file = whole
    file.add(event.format("3.000"))
    file.close()
    file.close()
    assert [entry["ts"] for entry in Trace(path).events] == [1, 3]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.000"), (1e-9, "0.001"), (1.5, "1500000.000"), (123456.789012345, "123456789012.345")]
)
def test_microseconds(seconds: float, text: str) -> None:
    assert microseconds(seconds) == text


@pytest.mark.model
def test_the_real_model(path: Path, smollm2_gguf: Path) -> None:
    with LLM(str(smollm2_gguf), plugins=[TraceRecorder(path)], plugin_errors="raise") as llm:
        outputs = llm.generate(["The capital of France is", "Water boils at"], SamplingParams(max_tokens=8), use_tqdm=False)
    trace = Trace(path)
    for output in outputs:
        assert trace.of(output.request_id)[0].args["completion_tokens"] == len(output.outputs[0].token_ids)
    assert all(phase.end > phase.start for step in trace.steps for phase in trace.phases(step) if phase.name == "run")
    assert "France" not in path.read_text()
