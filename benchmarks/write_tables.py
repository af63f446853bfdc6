"""Fills the tables of ``docs/performance.md`` from ``benchmarks/results/*.json``. No figure there is written by hand.

    python benchmarks/write_tables.py

A table stands between ``<!-- table NAME COLUMN COLUMN … -->`` and ``<!-- end -->``: the report NAME.json, these columns of its
summary (none: all). ``<!-- goals -->`` is the table of goals, drawn from several reports. What has not been measured says so.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"<!-- (table [^>]*|goals) -->\n.*?<!-- end -->\n", re.DOTALL)
NOT_MEASURED = "*Not measured yet.*"
QUANTISED, EXACT = ("int8", "int4"), ("bfloat16", "float32")
# What is to be reached against the best peer: case, modes of ours, and how many times its speed.
AGAINST_PEERS: tuple[tuple[str, str, Sequence[str], float], ...] = (
    ("n=1, 8- or 4-bit", "n=1", QUANTISED, 2.0),
    ("n=8, int8", "n=8", ("int8",), 1.75),
    ("n=32, int8", "n=32", ("int8",), 2.0),
    ("n=32, exact", "n=32", EXACT, 1.3),
    ("512-token prefill, int8", "prefill 512", ("int8",), 1.6),
)

Report = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.results.glob("*.json"))}
    options.page.write_text(fill(options.page.read_text(encoding="utf-8"), reports), encoding="utf-8")


def fill(page: str, reports: dict[str, Report]) -> str:
    """The page with every table as the reports have it."""

    def block(match: re.Match[str]) -> str:
        words = match[1].split()
        if words[0] == "goals":
            body = "\n".join(_table(("goal", "asked", "measured", "best peer", "of"), list(_goals(reports))))
        elif words[1] in reports:
            body = _report(reports[words[1]], words[2:])
        else:
            body = NOT_MEASURED
        return f"<!-- {match[1]} -->\n{body}\n<!-- end -->\n"

    return BLOCK.sub(block, page)


def _report(report: Report, columns: Sequence[str]) -> str:
    rows = report["summary"]
    columns = columns or list(rows[0])
    titles = [name.replace("_per_s", "/s").replace("_", " ") for name in columns]
    lines = _table(titles, [[_cell(row[name]) for name in columns] for row in rows])
    facts = [f"{_title(name)}: {_fact(name, value)}" for name, value in report["facts"].items()]
    return "\n".join([*lines, "", *([", ".join(facts) + ".", ""] if facts else []), _origin(report)])


def _goals(reports: dict[str, Report]) -> Iterator[list[str]]:
    for goal, case, modes, least in AGAINST_PEERS:
        rows = [row for row in reports.get("peers", {"summary": []})["summary"] if row["case"] == case and row["ours"] in modes]
        asked = f"{least:g} x the best peer"
        if not rows:
            yield [goal, asked, NOT_MEASURED, "", ""]
            continue
        # The best peer is the one that this engine's best mode is least ahead of.
        peers = dict.fromkeys(row["peer"] for row in rows)
        best = {peer: max((row for row in rows if row["peer"] == peer), key=_ratio) for peer in peers}
        row = min(best.values(), key=_ratio)
        ours, theirs = f"{row['ours_median']:g} {row['unit']} ({row['ours']})", f"{row['peer_median']:g} {row['unit']}"
        yield [goal, asked, f"**{row['ratio']:g} x**: {ours}", theirs, row["peer"]]
    for goal, asked, name, find in ALONE:
        found = find(reports[name]) if name in reports else None
        yield [goal, asked, NOT_MEASURED if found is None else found, "", ""]


def _ratio(row: dict[str, Any]) -> float:
    return float(row["ratio"])


def _ready(report: Report) -> str | None:
    row = next((row for row in report["summary"] if row["phase"] == "engine ready, in all"), None)
    return None if row is None else f"**{row['seconds']:g} s**"


def _int8_loss(report: Report) -> str | None:
    rows = [row for row in report["summary"] if row["weights"] == "int8" and row["cache"] == "bfloat16"]
    found = [f"**{row['percent_over_float32']:+g} %** (groups of {row['activation_group']})" for row in rows]
    return ", ".join(found) or None


def _outside(report: Report) -> str | None:
    row = next((row for row in report["summary"] if row["part"] == "outside kernels"), None)
    return None if row is None else f"**{row['median_ms']:g} ms**, n={report['settings']['num_sequences']}"


def _memory(report: Report) -> str | None:
    resident, peak = report["facts"].get("memory_resident_bytes"), report["facts"].get("memory_peak_bytes")
    return None if resident is None else f"**{resident / 1e6:.0f} MB**, at most {peak / 1e6:.0f} MB"


ALONE: tuple[tuple[str, str, str, Callable[[Report], str | None]], ...] = (
    ("engine ready, imports included, files cached", "less than 3 s", "startup", _ready),
    ("perplexity of int8 against float32", "within 1 %", "perplexity", _int8_loss),
    ("Python time per step outside kernels", "less than 1.5 ms", "step", _outside),
    ("resident memory, int8, 2,048-token window", "less than 900 MB", "step", _memory),
)


def _origin(report: Report) -> str:
    machine, software = report["machine"], report["software"]
    commit = software["commit"]
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    return (
        f"<sub>{report['title']}. {report['date'][:10]}, {machine['cpu']}, {machine['cores']} cores{memory}, "
        f"torch {software['torch']}, commit {commit or 'unknown'}.</sub>"
    )


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _title(name: str) -> str:
    return name.removesuffix("_bytes").replace("_", " ")


def _fact(name: str, value: Any) -> str:
    return f"{value / 1e6:,.0f} MB" if name.endswith("_bytes") and value is not None else _cell(value)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    main()
