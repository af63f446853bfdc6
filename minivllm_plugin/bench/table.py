"""A report as a person reads it: a table, single figures below, and where it was measured."""

from pathlib import Path
from typing import Any

from minivllm_plugin.bench.report import Report

__all__ = ["show_report"]

WIDTH_OFF_TERMINAL = 160


def show_report(report: Report, json_path: Path | None) -> None:
    """Print the summary; write everything to ``json_path`` if there is one."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title=f"{report.benchmark}: {report.title}", title_justify="left")
    for name in report.summary[0] if report.summary else ():
        is_text = any(isinstance(row[name], str) for row in report.summary)
        table.add_column(name.replace("_per_s", "/s").replace("_", " "), justify="left" if is_text else "right")
    for row in report.summary:
        table.add_row(*map(_cell, row.values()))
    console = Console()
    console = Console(width=None if console.is_terminal else WIDTH_OFF_TERMINAL, highlight=False, markup=False)
    console.print(table)
    for name, value in report.facts.items():
        console.print(f"{name.removesuffix('_bytes').replace('_', ' ')}: {_fact(name, value)}")
    machine, software = report.machine, report.software
    commit = software["commit"]
    console.print(
        f"{report.date}, {machine['cpu']}, {machine['cores']} cores, load {(machine['load_average'] or ['?'])[0]}, "
        f"minivllm-plugin {software['minivllm-plugin']}{f' at {commit}' if commit else ''}, torch {software['torch']}",
        style="dim",
    )
    if json_path is not None:
        report.write(json_path)
        console.print(f"written to {json_path}", style="dim")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _fact(name: str, value: Any) -> str:
    return f"{value / 1e6:,.0f} MB" if name.endswith("_bytes") and value is not None else _cell(value)
