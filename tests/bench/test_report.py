"""What is written beside the figures: where, with what, and all runs."""

import json
import math
import subprocess
from pathlib import Path

import pytest

from minivllm_plugin.bench import machine
from minivllm_plugin.bench.machine import (
    describe_command,
    describe_machine,
    describe_software,
    resident_memory,
    without_directories,
)
from minivllm_plugin.bench.report import Report, check_writable, median, percentile, significant
from minivllm_plugin.bench.table import show_report
from minivllm_plugin.errors import ConfigError


def test_percentiles() -> None:
    assert median([3, 1, 2]) == 2
    assert median([4, 1, 2, 3]) == 2.5
    assert percentile([10, 20, 30, 40, 50], 90) == pytest.approx(46)
    assert percentile([7], 99) == 7
    assert percentile(range(101), 0) == 0
    assert percentile(range(101), 100) == 100
    assert math.isnan(percentile([], 50))


def test_significant_digits() -> None:
    assert [significant(value) for value in (123456.0, 0.00012345678, 9.99999)] == [123500.0, 0.0001235, 10.0]
    assert significant(123456.0, 2) == 120000.0


def test_the_json_says_where_and_with_what(tmp_path: Path) -> None:
    report = Report("b", "t", {"a": 1}, [{"x": 1.0}], [{"run": 1}], {"size_bytes": 5})
    report.write(tmp_path / "r.json")
    read = json.loads((tmp_path / "r.json").read_text())
    assert set(read) == {
        "benchmark",
        "title",
        "settings",
        "summary",
        "runs",
        "facts",
        "machine",
        "software",
        "date",
        "command",
        "format",
    }
    assert set(read["machine"]) == {"cpu", "cpu_features", "cores", "memory_bytes", "system", "load_average"}
    assert read["machine"]["cores"] >= 1
    assert read["machine"]["memory_bytes"] > 1e8
    assert set(read["software"]) == {"python", "commit", "minivllm-plugin", "torch", "numpy", "tokenizers", "transformers"}
    assert read["date"].endswith("+00:00")
    assert (read["settings"], read["summary"], read["runs"]) == ({"a": 1}, [{"x": 1.0}], [{"run": 1}])


def test_the_commit_is_that_of_this_very_file_or_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        settings = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *settings, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    installed = tmp_path / "machine.py"
    installed.write_text("")
    (tmp_path / "theirs.txt").write_text("")
    monkeypatch.setattr(machine, "__file__", str(installed))
    git("init")
    git("add", "theirs.txt")
    git("commit", "-m", "theirs")
    assert describe_software()["commit"] is None  # installed inside somebody else's checkout
    git("add", "machine.py")
    git("commit", "-m", "ours")
    commit = describe_software()["commit"]
    assert len(commit) == 12
    installed.write_text("changed")
    assert describe_software()["commit"] == f"{commit}-dirty"


def test_results_being_written_do_not_make_the_commit_dirty(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        settings = ["-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", *settings, "-C", str(tmp_path), *arguments], check=True, capture_output=True)

    places = [tmp_path / name for name in ("package/bench/machine.py", "benchmarks/results/a.json", "docs/performance.md")]
    for place in places:
        place.parent.mkdir(parents=True)
        place.write_text("")
    monkeypatch.setattr(machine, "__file__", str(places[0]))
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    for place in places[1:]:
        place.write_text("a run's")
    assert len(describe_software()["commit"]) == 12
    places[0].write_text("changed")
    assert describe_software()["commit"].endswith("-dirty")


def test_the_command_can_be_typed_again_and_tells_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(machine.__file__).parents[2]
    arguments = ["smollm2-135m", "--openvino", "/home/me/ov/bin/python", "--json=/tmp/r.json", "--set", "a b", "--n", "1,8"]
    monkeypatch.setattr("sys.argv", [str(root / "benchmarks" / "peers.py"), *arguments])
    expected = "python benchmarks/peers.py smollm2-135m --openvino …/python --json=…/r.json --set 'a b' --n 1,8"
    assert describe_command() == expected
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/minivllm", "bench", "startup"])
    assert describe_command() == "minivllm bench startup"


def test_directories_are_cut_and_relative_places_kept() -> None:
    assert without_directories("no '/root/.cache/m/x.gguf' here, ~/a/b neither") == "no '…/x.gguf' here, …/b neither"
    assert without_directories("benchmarks/results/a.json 1/2 n/a") == "benchmarks/results/a.json 1/2 n/a"


def test_no_git_is_no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert describe_software()["commit"] is None


def test_memory_of_this_process() -> None:
    memory = resident_memory()
    if memory["resident"] is None:
        pytest.skip("this system does not tell")
    assert memory["peak"] is not None
    assert 1e6 < memory["resident"] <= memory["peak"] * 1.01


def test_a_place_that_cannot_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    check_writable(None)
    check_writable(tmp_path / "new.json")
    for path in (tmp_path, tmp_path / "missing" / "r.json"):
        with pytest.raises(ConfigError, match=r"cannot be written.*directory"):
            check_writable(path)


def test_the_table_shows_rows_facts_and_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [{"case": "n=1", "tok_per_s": 1234.5, "left_out": None}, {"case": "n=8", "tok_per_s": 0.5, "left_out": 3}]
    show_report(Report("b", "title", {}, rows, [], {"peak_bytes": 2_000_000, "steps": 1234}), tmp_path / "r.json")
    out = capsys.readouterr().out
    for part in ("b: title", "tok/s", "left out", "1,234", "0.5", "-", "peak: 2 MB", "steps: 1,234", "cores", "written to"):
        assert part in out
    assert (tmp_path / "r.json").is_file()
    assert str(describe_machine()["cores"]) in out
