"""``docs/performance.md`` shows what the reports in ``benchmarks/results`` say, and nothing else."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minivllm_plugin.bench.report import Report

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def tables(script: Callable[[str], ModuleType]) -> Any:
    return script("write_tables")


def report(rows: list[dict[str, Any]], facts: dict[str, Any] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(Report("b", "a title", {"num_sequences": 32}, rows, [], facts or {}).to_json())
    return made


def test_the_page_is_as_the_results_have_it(tables: Any, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text(encoding="utf-8"), encoding="utf-8")
    tables.main(["--page", str(page)])
    assert page.read_text(encoding="utf-8") == PAGE.read_text(encoding="utf-8"), "run python benchmarks/write_tables.py"


def test_every_result_is_shown_and_names_no_path() -> None:
    shown = set(re.findall(r"<!-- table (\S+)", PAGE.read_text(encoding="utf-8")))
    for path in RESULTS.glob("*.json"):
        assert path.stem in shown
        assert not re.search(r'"[^"]*(?:/tmp/|/home/|/root/|/work/)', path.read_text(encoding="utf-8")), path.name


def test_a_table_is_filled_and_filled_again(tables: Any) -> None:
    page = "a\n<!-- table x case tok_per_s -->\n*Not measured yet.*\n<!-- end -->\nb\n<!-- table y -->\nold\n<!-- end -->\n"
    rows = [{"case": "n=1", "tok_per_s": 1234.5, "hidden": 1}, {"case": "n=2", "tok_per_s": None, "hidden": 2}]
    filled = tables.fill(page, {"x": report(rows, {"peak_bytes": 3_000_000})})
    assert "| case | tok/s |\n| --- | --- |\n| n=1 | 1,234 |\n| n=2 | – |\n" in filled
    assert "peak: 3 MB." in filled
    assert "a title. 20" in filled
    assert "<!-- table y -->\n*Not measured yet.*\n<!-- end -->" in filled
    assert tables.fill(filled, {"x": report(rows, {"peak_bytes": 3_000_000})}) == filled
    assert tables.fill(filled, {}).count("Not measured yet") == 2


def test_goals_take_the_hardest_peer_and_our_best_mode(tables: Any) -> None:
    def row(peer: str, ours: str, ratio: float, case: str = "n=1") -> dict[str, Any]:
        return {
            "peer": peer,
            "ours": ours,
            "case": case,
            "unit": "tok/s",
            "ours_median": 200.0,
            "peer_median": 100.0,
            "ratio": ratio,
        }

    peers = [
        row("slow Q4_0", "int8", 9.0),
        row("fast Q4_0", "int8", 1.5),
        row("fast Q4_0", "int4", 2.5),
        row("a F16", "bfloat16", 1.1),
    ]
    startup = [{"phase": "engine ready, in all", "seconds": 1.25}]
    step = report([{"part": "outside kernels", "median_ms": 0.75}], {"memory_resident_bytes": 5e8, "memory_peak_bytes": 6e8})
    quality = [
        {"weights": "int8", "activation_group": 64, "cache": "bfloat16", "percent_over_float32": 0.5},
        {"weights": "int8", "activation_group": 64, "cache": "int8", "percent_over_float32": 0.9},
    ]
    reports = {"peers": report(peers), "startup": report(startup), "step": step, "perplexity": report(quality)}
    filled = tables.fill("<!-- goals -->\n<!-- end -->\n", reports)
    assert "| **2.5 x**: 200 tok/s (int4) | 100 tok/s | fast Q4_0 |" in filled
    assert filled.count("Not measured yet") == 4  # n=8, n=32 twice, prefill
    for part in ("**1.25 s**", "**0.75 ms**, n=32", "**500 MB**, at most 600 MB", "**+0.5 %** (groups of 64)"):
        assert part in filled
