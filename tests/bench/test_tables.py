"""``docs/performance.md`` shows what the reports in ``benchmarks/results`` say, and nothing else."""

import json
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
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
    shown = re.findall(r"<!-- table (\S+)", PAGE.read_text(encoding="utf-8"))
    for path in RESULTS.glob("*.json"):
        assert any(fnmatchcase(path.stem, pattern) for pattern in shown), path.name
        assert not re.search(r'"[^"]*(?:/tmp/|/home/|/root/|/work/)', path.read_text(encoding="utf-8")), path.name


def test_a_table_is_filled_and_filled_again(tables: Any) -> None:
    page = "a\n<!-- table x case tok_per_s -->\nolder\n<!-- end -->\nb\n<!-- table y -->\nold\n<!-- end -->\n"
    rows = [{"case": "n=1", "tok_per_s": 1234.5, "hidden": 1}, {"case": "n=2", "tok_per_s": None, "hidden": 2}]
    x = report(rows, {"peak_bytes": 3_000_000}) | {"command": "minivllm bench it"}
    filled = tables.fill(page, {"x": x})
    assert "| case | tok/s |\n| --- | --- |\n| n=1 | 1,234 |\n| n=2 | – |\n" in filled
    assert "peak: 3 MB." in filled
    assert "a title. 20" in filled
    assert "<code>minivllm bench it</code>" in filled
    assert "<!-- table y -->\n*Not measured.*\n<!-- end -->" in filled
    assert tables.fill(filled, {"x": x}) == filled
    assert tables.fill(filled, {}).count("*Not measured.*") == 2


def test_a_table_of_several_reports_has_the_rows_of_all(tables: Any) -> None:
    page = "<!-- table x-* who -->\n<!-- end -->\n"
    one, two = (report([{"who": name}]) for name in ("first", "second"))
    one["settings"] = {"versions": {"llama.cpp": {"llama-cpp-python": "0.3"}}, "failed": ["vllm failed: no memory"]}
    filled = tables.fill(page, {"x-b": two, "x-a": one, "xx": two})
    assert "| first |\n| second |\n\n" in filled
    assert filled.count("<sub>") == 2
    assert "llama-cpp-python 0.3, commit" in filled
    assert "Left out: vllm failed: no memory." in filled


def row(peer: str, ours: str, ratio: float, case: str = "n=1") -> dict[str, Any]:
    speeds = {"ours_median": 200.0, "peer_median": 100.0, "ratio_least": ratio - 0.5, "ratio_most": ratio + 0.5}
    return {"peer": peer, "ours": ours, "case": case, "unit": "tok/s", "ratio": ratio, **speeds}


def test_goals_take_the_hardest_peer_and_our_best_mode(tables: Any) -> None:
    first = [row("slow Q4_0", "int8", 9.0), row("a F16", "bfloat16", 1.1, "n=32")]
    second = [
        row("fast Q4_0", "int8", 1.5),
        row("fast Q4_0", "int4", 2.5),
        row("fast Q4_0", "int8 num_speculative_tokens=0", 1.25),
    ]
    startup = [{"phase": "engine ready, in all", "seconds": 1.25, "fastest_s": 1.0, "slowest_s": 1.5}]
    outside = [{"part": "outside kernels", "median_ms": 0.75, "p90_ms": 0.9}]
    quality = [
        {"weights": "int8", "activation_group": 64, "cache": "bfloat16", "percent_over_float32": 1.5},
        {"weights": "int8", "activation_group": 32, "cache": "bfloat16", "percent_over_float32": 0.5},
        {"weights": "int8", "activation_group": 64, "cache": "int8", "percent_over_float32": 1.9},
    ]
    reports = {
        "peers-a": report(first),
        "peers-b": report(second),
        "startup": report(startup),
        "step": report(outside, {"memory_resident_bytes": 5e8, "memory_peak_bytes": 6e8}),
        "perplexity": report(quality),
    }
    filled = tables.fill("<!-- goals -->\n<!-- end -->\n", reports)
    for line in (
        "| n=1 decode, int8 or int4 | 2 x the best peer | fast Q4_0: 100 tok/s | int4: 200 tok/s | **2.5** | 2–3 | yes |",
        "| fast Q4_0: 100 tok/s | int8 num_speculative_tokens=0: 200 tok/s | **1.25** | 0.75–1.75 | no |",
        "| n=32, 16- or 32-bit | 1.3 x the best peer | a F16: 100 tok/s | bfloat16: 200 tok/s | **1.1** | 0.6–1.6 | no |",
        "at most 3 s |  | 1.25 s (1–1.5) |  |  | yes |",
        "at most 1 % |  | +1.5 % (groups of 64), +0.5 % (groups of 32) |  |  | no |",
        "at most 1.5 ms |  | 0.75 ms (p90 0.9) |  |  | yes |",
        "at most 900 MB |  | 500 MB, at its peak 600 MB |  |  | yes |",
        "| n=8, int8 | 1.75 x the best peer | not measured | not measured | not measured | not measured |  |",
    ):
        assert line in filled


def test_goals_of_another_model_are_those_against_peers(tables: Any) -> None:
    reports = {"peers-a": report([row("a Q4_0", "int8", 9.0)]), "qwen3-a": report([row("b Q4_0", "int8", 3.0)])}
    filled = tables.fill("<!-- goals qwen3-* -->\n<!-- end -->\n", reports)
    assert "| b Q4_0: 100 tok/s |" in filled
    assert "a Q4_0" not in filled
    assert "engine ready" not in filled
