"""``minivllm simulate`` from its arguments to its files."""

import json
from pathlib import Path

import pytest

from minivllm_plugin.cli import main
from minivllm_plugin.simulation import CostModel, generate_trace, write_trace


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["simulate", *arguments])
    captured = capsys.readouterr()
    return int(left.value.code or 0), captured.out, captured.err


def test_a_file_compared_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, figures, page, cost = (tmp_path / name for name in ("t.jsonl", "f.json", "p.html", "c.json"))
    write_trace(generate_trace(40, rate=20, turns=2, tenants=2), trace)
    CostModel(0.01, 0.001, description="by hand").save(cost)
    code, out, err = run(
        capsys, str(trace), "--compare", "fcfs,sjf", "--cost-model", str(cost), "--blocks", "200", "--requests", "60",
        "--rate-scale", "2", "--replicas", "2", "--router", "least_loaded", "--json", str(figures), "--html", str(page),
    )  # fmt: skip
    assert code == 0, err
    assert "60 requests" in out
    assert "sjf" in out
    assert "cost model: by hand" in out
    assert "tenant-1" in out
    assert "leapt over" in out
    results = json.loads(figures.read_text())["results"]
    assert [one["name"] for one in results] == ["fcfs", "sjf"]
    assert results[0]["settings"]["replicas"] == 2
    assert results[0]["num_finished"] == 60
    assert page.read_text().startswith("<!doctype html>")


def test_a_synthetic_trace_with_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "synthetic", "--requests", "20", "--rate", "9", "--output-tokens", "4", "--policy", "sjf", "--policy", "slru"
    )
    assert code == 0
    assert "sjf+slru" in out
    assert "illustrative" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--measure MODEL"),
        (("none.jsonl",), "no such file"),
        (("synthetic", "--policy", "sjf", "--compare", "lpm"), "--policy and --compare"),
        (("synthetic", "--blocks", "some"), "--blocks"),
        (("synthetic", "--policy", "nearest"), "nearest"),
        (("synthetic", "--replicas", "2", "--router", "nearest"), "router"),
        (("synthetic", "--save-cost-model", "x.json"), "--measure MODEL"),
        (("synthetic", "--cost-model", "a", "--measure", "b"), "use one"),
        (("synthetic", "--prompt-tokens", "few"), "lengths"),
        (("x.csv", "--time-unit", "h"), "--time-unit"),
        (("synthetic", "--json", "no/such/f.json"), "no/such/f.json cannot be written: its directory must exist"),
        (("synthetic", "--html", "no/such/f.html"), "no/such/f.html cannot be written: its directory must exist"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 1
    assert message in err
    assert "Traceback" not in err
