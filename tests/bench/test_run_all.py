"""The one command that measures everything: its pieces are commands that exist, and what is there is not measured again."""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minivllm_plugin.bench.report import Report

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
WRITES = """
import pathlib, sys
target = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
target.write_text(pathlib.Path(sys.argv[1]).read_text())
"""


@pytest.fixture
def run_all(script: Callable[[str], ModuleType]) -> Any:
    return script("run_all")


@pytest.fixture
def everything(script: Callable[[str], ModuleType]) -> Any:
    module = script("pieces")
    return module.pieces(module.Peers("ov", "lc", 3))


def test_every_piece_has_a_place_on_the_page_and_a_script(script: Callable[[str], ModuleType], everything: Any) -> None:
    page = PAGE.read_text(encoding="utf-8")
    fill = script("write_tables").fill
    names = [piece.name for piece in everything]
    assert len(set(names)) == len(names)
    for piece in everything:
        shown = Report("b", "t", {}, [{"marker": "it is there"}], [])
        assert "it is there" in fill(page_of_tables(page), {piece.name: json.loads(shown.to_json())}), piece.name
        assert piece.command[0] == sys.executable
        assert piece.command[1] == "-c" or Path(piece.command[1]).is_file()
        assert 0 < piece.seconds < 240
    assert sum(piece.seconds for piece in everything) < 1500


def page_of_tables(page: str) -> str:
    """Its markers, with every column of a table shown."""
    lines = [line for line in page.splitlines() if line.startswith("<!-- table")]
    return "".join(f"<!-- table {line.split()[2]} -->\n<!-- end -->\n" for line in lines)


def test_what_is_asked_of_peers_is_understood(script: Callable[[str], ModuleType], everything: Any) -> None:
    peers = script("peers")
    contests = [piece for piece in everything if piece.command[1].endswith("peers.py")]
    for piece in contests:
        options = peers._parse(piece.command[2:])
        assert options.model in ("smollm2-135m", "qwen3-0.6b")
        assert len(options.against) == len(options.formats) == len(options.scenario) == 1
        assert options.rounds >= 2
    sizes = [size for piece in contests for size in peers._parse(piece.command[2:]).n if piece.name.startswith("qwen3-llama")]
    assert sorted(sizes) == [1, 8, 32]


def test_what_has_no_peer_says_so(script: Callable[[str], ModuleType]) -> None:
    module = script("pieces")
    found = {piece.name: piece.missing for piece in module.pieces(module.Peers(openvino="ov"))}
    assert found["peers-openvino-q4"] is None
    assert found["peers-llama-cpp-q4"] == "--llama-cpp is not named"
    assert found["startup"] is None


def test_the_list_runs_nothing(run_all: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run_all.main(["--list", "--out", str(tmp_path / "new")])
    out = capsys.readouterr().out
    assert "peers-openvino-q4" in out
    assert "(--openvino is not named)" in out
    assert out.splitlines()[-1].startswith("in all")
    assert not (tmp_path / "new").exists()


def test_pieces_run_are_kept_and_written_on_the_page(
    run_all: Any,
    script: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def result(value: str, hours: float = 0.0) -> str:
        made = json.loads(Report("b", "t", {}, [{"value": value}], []).to_json())
        return json.dumps(made | {"date": (datetime.now(UTC) - timedelta(hours=hours)).isoformat()})

    new, writer = tmp_path / "new.json", tmp_path / "writer.py"
    new.write_text(result("new"))
    writer.write_text(WRITES)
    out = tmp_path / "results"
    out.mkdir()
    (out / "young.json").write_text(result("kept", hours=1))
    (out / "old.json").write_text(result("replaced", hours=9))
    (out / "broken.json").write_text(result("still the old one", hours=9))
    page = tmp_path / "page.md"
    names = ("young", "old", "fresh", "broken", "absent", "long")
    page.write_text("".join(f"<!-- table {name} -->\n<!-- end -->\n" for name in names))
    piece = script("pieces").Piece
    write = (sys.executable, str(writer), str(new))
    made = [
        *(piece(name, write, 1) for name in ("young", "old", "fresh")),
        piece("broken", (sys.executable, "-c", "raise SystemExit('it broke')"), 1),
        piece("absent", write, 1, "its peer is not named"),
        piece("long", write, 10_000),
    ]
    monkeypatch.setattr(run_all, "pieces", lambda peers: made)
    with pytest.raises(SystemExit, match="failed: broken"):
        run_all.main(["--out", str(out), "--page", str(page), "--within", "1000"])
    text = page.read_text()
    assert text.count("| new |") == 2
    assert "| kept |" in text
    assert "| still the old one |" in text
    assert "replaced" not in text
    assert text.count("*Not measured.*") == 2
    said = capsys.readouterr().out
    for part in ("it broke", "absent: left out, its peer is not named", "no time for long"):
        assert part in said
    run_all.main(["--out", str(out), "--page", str(page), "--only", "young", "--keep-hours", "0"])
    assert page.read_text().count("| new |") == 3


STARTS_ANOTHER = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""


def test_what_takes_too_long_is_ended_with_all_that_it_started(
    run_all: Any, script: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    noted = tmp_path / "pid"
    piece = script("pieces").Piece("slow", (sys.executable, "-c", STARTS_ANOTHER, str(noted)), 1)
    target = tmp_path / "slow.json"
    limit = 2.0
    while not noted.exists():  # a busy machine needs longer to get so far
        assert not run_all._run(piece, target, limit)
        limit *= 2
    assert "slow: took more than" in capsys.readouterr().out
    assert not target.exists()
    deadline = time.monotonic() + 30
    while _runs(int(noted.read_text())) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(int(noted.read_text()))


def _runs(pid: int) -> bool:
    """A process that has ended and that nobody has asked after counts as ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{pid}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
