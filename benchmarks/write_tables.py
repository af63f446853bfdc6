"""Fills the tables of ``docs/performance.md`` from ``benchmarks/results/*.json``. No figure there is written by hand.

    python benchmarks/write_tables.py

A table stands between ``<!-- table NAME COLUMN COLUMN … -->`` and ``<!-- end -->``: the report NAME.json, these columns of its
summary (none: all); with a ``*`` in NAME the rows of all reports of such names. ``<!-- goals -->`` is the table of goals, drawn
from several reports, ``<!-- goals NAME -->`` its part against the peers. What has not been measured says so.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from goals import COLUMNS, NOT_MEASURED, goal_rows, reports_named

__all__ = ["fill", "main"]

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"<!-- (table [^>]*|goals(?: [^ >]+)?) -->\n.*?<!-- end -->\n", re.DOTALL)

Report = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args(arguments)
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.results.glob("*.json"))}
    options.page.write_text(fill(options.page.read_text(encoding="utf-8"), reports), encoding="utf-8")


def fill(page: str, reports: Mapping[str, Report]) -> str:
    """The page with every table as the reports have it."""

    def block(match: re.Match[str]) -> str:
        what, *words = match[1].split()
        if what == "goals":
            body = "\n".join(_table(COLUMNS, list(goal_rows(reports, *words))))
        else:
            body = _reports(reports_named(reports, words[0]), words[1:])
        return f"<!-- {match[1]} -->\n{body}\n<!-- end -->\n"

    return BLOCK.sub(block, page)


def _reports(reports: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str:
    """One table of all their rows, then what stands beside it, and where each comes from."""
    rows = [row for report in reports for row in report["summary"]]
    if not rows:
        return f"*{NOT_MEASURED.capitalize()}.*"
    columns = columns or list(rows[0])
    titles = [name.replace("_per_s", "/s").replace("_", " ") for name in columns]
    lines = _table(titles, [[_cell(row.get(name)) for name in columns] for row in rows])
    facts = [f"{_title(name)}: {_fact(name, value)}" for report in reports for name, value in report["facts"].items()]
    return "\n".join([*lines, "", *([", ".join(facts) + ".", ""] if facts else []), *map(_origin, reports)])


def _origin(report: Mapping[str, Any]) -> str:
    machine, software, settings = report["machine"], report["software"], report["settings"]
    memory = f", {machine['memory_bytes'] / 2**30:.0f} GiB" if machine["memory_bytes"] else ""
    versions = {name: version for packages in settings.get("versions", {}).values() for name, version in packages.items()}
    versions = {"torch": software["torch"], **{name: versions[name] for name in versions if name != "minivllm-plugin"}}
    parts = [
        f"{report['title']}. {report['date'][:10]}, {machine['cpu']}, {machine['cores']} cores{memory}",
        *(f"{name} {version}" for name, version in versions.items()),
        f"commit {software['commit'] or 'unknown'}",
    ]
    command = f" <code>{report['command']}</code>" if "command" in report else ""
    failed = f" Left out: {'; '.join(settings['failed'])}." if settings.get("failed") else ""
    return f"<sub>{', '.join(parts)}.{command}{failed}</sub>"


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
