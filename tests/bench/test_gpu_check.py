"""scripts/gpu_check: its rehearsal on the CPU, what it says without a GPU, and what is made of what its parts say."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minivllm_plugin.bench.gpu import command
from minivllm_plugin.bench.gpu.comparing import comparing
from minivllm_plugin.bench.gpu.idle import covered
from minivllm_plugin.bench.gpu.parts import PARTS, Part
from minivllm_plugin.bench.gpu.records import Given, Recorder, read_records
from minivllm_plugin.bench.gpu.report import GpuReport

ROOT = Path(__file__).parents[2]
NAMES = [part.name for part in PARTS]
CHECKED = {"kernels", "generations", "workload"}


def gpu_check(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """Without the variables by which this very process interprets kernels."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "COV_"))}
    environment |= {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [str(ROOT / "scripts" / "gpu_check"), "--no-setup", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple["subprocess.CompletedProcess[str]", dict[str, Any]]:
    pytest.importorskip("triton", reason="the GPU kernels need triton (in the developers' packages on Linux)")
    path = tmp_path_factory.mktemp("check") / "report.json"
    done = gpu_check("--rehearse", "--json", str(path))
    return done, json.loads(path.read_text())


def test_every_part_runs_on_the_cpu(rehearsal: tuple["subprocess.CompletedProcess[str]", dict[str, Any]]) -> None:
    done, report = rehearsal
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(report["parts"]) == NAMES
    assert {name: part["ended"] for name, part in report["parts"].items()} == dict.fromkeys(NAMES, "done")
    assert report["right"]
    checks = {name: part["checks"] for name, part in report["parts"].items() if part["checks"]}
    assert set(checks) == CHECKED
    assert all(check["passed"] for part in checks.values() for check in part)
    kernels = {check["name"].split()[0] for check in checks["kernels"]}
    assert kernels >= {"rms_norm", "add_rms_norm", "silu_and_mul", "rotary", "store_kv", "norm_rotary_store", "attention"}
    assert kernels >= {"argmax", "sample_rows"}
    assert {"software", "machine", "date", "command"} <= set(report)


def test_a_rehearsal_claims_no_speed(rehearsal: tuple["subprocess.CompletedProcess[str]", dict[str, Any]]) -> None:
    done, report = rehearsal
    figures = [figure for part in report["parts"].values() for figure in part["figures"]]
    assert len(figures) > 10
    assert {(figure["value"], figure["ratio"], figure["reached"]) for figure in figures} == {(None, None, None)}
    assert report["rehearsal"] is True
    assert "a rehearsal on the CPU, which measures nothing" in done.stdout
    assert str(ROOT) not in json.dumps(report)


def test_without_a_gpu_it_says_so_in_one_line_and_ends_with_2() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = gpu_check()
    assert done.returncode == command.NO_GPU == 2
    assert len(done.stdout.splitlines()) == 1
    assert "there is no GPU here to check" in done.stdout


@pytest.fixture
def written(tmp_path: Path) -> Path:
    return tmp_path / "report.json"


def run_parts(
    monkeypatch: pytest.MonkeyPatch, path: Path, bodies: dict[str, str], *, must_end: Sequence[str] = (), seconds: float = 60.0
) -> tuple[int, dict[str, Any]]:
    """The command over parts that are these lines of Python, with ``record`` and ``given`` at hand, each in a real process."""
    parts = tuple(Part(name, name, seconds, must_end=name in must_end) for name in bodies)

    def process_of(part: Part, records: Path, given: Given) -> list[str]:
        head = (
            "from minivllm_plugin.bench.gpu.records import Given, Recorder\n"
            f"given = {given!r}\nrecord = Recorder(open({str(records)!r}, 'a'))\n"
        )
        return [sys.executable, "-c", head + bodies[part.name]]

    monkeypatch.setattr(command, "PARTS", parts)
    monkeypatch.setattr(command, "_no_gpu", lambda: None)
    monkeypatch.setattr(command, "_process_of", process_of)
    code = command.main(["--json", str(path)])
    return code, json.loads(path.read_text())


def test_a_part_that_breaks_stops_no_other_and_what_it_said_stays(
    monkeypatch: pytest.MonkeyPatch, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = {
        "floors": "record.fact('bandwidth_bytes_per_s', 4e12)",
        "breaks": "record.figure('before', 3.0, 'ms', 1.5)\nraise RuntimeError('an illegal memory access')",
        "after": "record.figure('tokens', 100, 'tok/s', given.known['bandwidth_bytes_per_s'] / 8e10, 'at least')",
    }
    code, report = run_parts(monkeypatch, written, bodies)
    assert code == 0  # no check failed, and this part need not come to its end
    broken = report["parts"]["breaks"]
    assert broken["ended"] == "broken"
    assert "an illegal memory access" in broken["reason"]
    assert broken["figures"] == [
        {"name": "before", "value": 3.0, "unit": "ms", "bound": 1.5, "held_to": "floor", "ratio": 0.5, "reached": None}
    ]
    (after,) = report["parts"]["after"]["figures"]
    assert (after["bound"], after["ratio"], after["reached"]) == (50.0, 2.0, True)
    printed = capsys.readouterr().out
    assert "broken: exit 1" in printed
    assert "at least 50" in printed


def test_a_part_that_must_end_and_hangs_is_ended_with_what_it_started(monkeypatch: pytest.MonkeyPatch, written: Path) -> None:
    bodies = {
        "hangs": "record.check('first', True)\nimport subprocess, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)",
        "other": "record.check('second', True)",
    }
    code, report = run_parts(monkeypatch, written, bodies, must_end=["hangs"], seconds=5.0)
    assert code == 1
    assert not report["right"]
    assert report["parts"]["hangs"]["ended"] == "stopped"
    assert [check["name"] for check in report["parts"]["hangs"]["checks"]] == ["first"]
    assert report["parts"]["other"]["ended"] == "done"


def test_a_failed_check_fails_the_whole(
    monkeypatch: pytest.MonkeyPatch, written: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report = run_parts(monkeypatch, written, {"one": "record.check('tokens are the same', False, 'request 3 differs')"})
    assert code == 1
    assert not report["right"]
    assert "FAILED tokens are the same: request 3 differs" in capsys.readouterr().out


def test_parts_that_no_time_is_left_for_are_skipped_by_name(monkeypatch: pytest.MonkeyPatch, written: Path) -> None:
    monkeypatch.setattr(command, "PARTS", (replace(PARTS[0], least=1e9),))
    monkeypatch.setattr(command, "_no_gpu", lambda: None)
    assert command.main(["--json", str(written)]) == 1  # it is one that must come to its end
    part = json.loads(written.read_text())["parts"]["environment"]
    assert part["ended"] == "skipped"
    assert "are left" in part["reason"]


def test_figures_beside_floors_and_goals() -> None:
    record = Recorder()
    record.figure("step", 2.0, "ms", 1.0, share=0.6)
    record.figure("step", 1.25, "ms", 1.0, share=0.6)
    record.figure("token", 1.7, "ms", 1.6, "at most")
    record.figure("alone", 5.0, "s")
    assert [(found["ratio"], found["reached"]) for found in record.records] == [
        (0.5, False),
        (0.8, True),
        (0.941, False),
        (None, None),
    ]
    assert record.records[0]["held_to"] == "60% of the floor"
    with pytest.raises(ValueError, match="step came out as nan ms"):
        record.figure("step", float("nan"), "ms")


def test_a_half_written_line_is_left_for_later(tmp_path: Path) -> None:
    path = tmp_path / "records"
    assert read_records(path) == []
    path.write_text('{"kind": "note", "text": "whole"}\n{"kind": "no')
    assert [found["text"] for found in read_records(path)] == ["whole"]


def test_comparisons_find_what_differs() -> None:
    record = Recorder()
    one = torch.tensor([1.0, torch.nan, 3.0])
    cases = {
        "equal": (one, one.clone()),
        "one place": (one, torch.tensor([1.0, torch.nan, 3.1])),
        "NaN": (one, torch.tensor([1.0, 2.0, 3.0])),
        "dtype": (one, one.double()),
    }
    for name, (got, expected) in cases.items():
        with comparing(record, f"close {name}") as found:
            found.close("result", got, expected)
    for name in ("equal", "one place", "NaN"):
        with comparing(record, f"same {name}") as found:
            found.same("result", *cases[name])
    with comparing(record, "but one") as found:
        found.same("result", *cases["one place"], but=1)
    with comparing(record, "raises"):
        raise RuntimeError("out of resources")
    passed = {found["name"] for found in record.records if found["passed"]}
    assert passed == {"close equal", "same equal", "but one"}
    assert record.records[-1]["detail"] == "RuntimeError: out of resources"


def test_idle_time_is_what_no_span_covers() -> None:
    assert covered([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (1.5, 1.75)]) == 5.0
    assert covered([]) == 0.0


def test_what_a_part_found_the_next_ones_know(tmp_path: Path) -> None:
    report = GpuReport(rehearse=False, quick=False, path=tmp_path / "r.json")
    record = Recorder()
    record.fact("device", "a card")
    report.put(PARTS[0], record.records, "done", 1.0)
    report.skip(PARTS[1], "no time")
    assert report.known() == {"device": "a card"}
    assert not report.is_right  # the kernels were not looked at
    assert json.loads((tmp_path / "r.json").read_text())["parts"]["kernels"]["reason"] == "no time"
