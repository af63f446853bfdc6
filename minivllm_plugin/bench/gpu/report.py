"""The report of the check: what every part said and how it ended, as JSON after every record, and as a table at the end."""

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from minivllm_plugin.bench.gpu.parts import Part
from minivllm_plugin.bench.gpu.records import Record
from minivllm_plugin.bench.machine import describe_command, describe_machine, describe_software

__all__ = ["FORMAT", "GpuReport"]

FORMAT = 1
WIDTH_OFF_TERMINAL = 140


class GpuReport:
    """Everything so far.

    Args:
        path: of the JSON; None writes none.
    """

    def __init__(self, *, rehearse: bool, quick: bool, path: Path | None) -> None:
        self._path = path
        self._must_end: set[str] = set()
        self._parts: dict[str, dict[str, Any]] = {}
        self._head: dict[str, Any] = {
            "benchmark": "gpu-check",
            "format": FORMAT,
            "rehearsal": rehearse,
            "quick": quick,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": describe_command(),
            "machine": describe_machine(),
            "software": describe_software(),
        }
        self._write()

    def put(self, part: Part, records: Sequence[Record], ended: str, seconds: float, reason: str = "") -> None:
        """What a part has said, all of it. ``ended``: ``running``, ``done``, ``stopped`` (out of time) or ``broken``."""
        if part.must_end:
            self._must_end.add(part.name)
        self._parts[part.name] = {
            "title": part.title,
            "ended": ended,
            "reason": reason,
            "seconds": round(seconds, 1),
            "checks": _of("check", records),
            "figures": _of("figure", records),
            "facts": {found["name"]: found["value"] for found in records if found["kind"] == "fact"},
            "notes": [found["text"] for found in records if found["kind"] == "note"],
        }
        self._write()

    def skip(self, part: Part, reason: str) -> None:
        """A part that is not begun."""
        self.put(part, [], "skipped", 0.0, reason)

    def known(self) -> dict[str, Any]:
        """All facts so far."""
        return {name: value for part in self._parts.values() for name, value in part["facts"].items()}

    @property
    def is_right(self) -> bool:
        """No check failed, and what must come to its end did."""
        parts = self._parts
        checked = all(check["passed"] for part in parts.values() for check in part["checks"])
        return checked and all(parts[name]["ended"] == "done" for name in self._must_end)

    def as_dict(self) -> dict[str, Any]:
        """The JSON."""
        return {**self._head, "right": self.is_right, "parts": self._parts}

    def show(self) -> None:
        """The table: figures and what they are held against, failed checks, how parts ended, and notes."""
        from rich.console import Console
        from rich.table import Table

        title = "gpu_check: a rehearsal on the CPU, which measures nothing" if self._head["rehearsal"] else "gpu_check"
        table = Table(box=None, pad_edge=False, title=title, title_justify="left")
        for name, justify in (
            ("part", "left"),
            ("what", "left"),
            ("measured", "right"),
            ("floor or goal", "right"),
            ("ratio", "right"),
            ("reached", "left"),
        ):
            table.add_column(name, justify="right" if justify == "right" else "left")
        for part in self._parts.values():
            _rows(table, part)
        console = Console()
        console = Console(width=None if console.is_terminal else WIDTH_OFF_TERMINAL, highlight=False, markup=False)
        console.print(table)
        for name, value in self.known().items():
            if isinstance(value, str):
                console.print(f"{name}: {value}", style="dim")
        software = self._head["software"]
        commit = f" at {software['commit']}" if software["commit"] else ""
        console.print(
            f"{self._head['date']}, minivllm-plugin {software['minivllm-plugin']}{commit}, torch {software['torch']}", style="dim"
        )
        console.print("everything that must be right is" if self.is_right else "SOMETHING IS WRONG: see the failed checks above")
        if self._path is not None:
            console.print(f"written to {self._path}", style="dim")

    def _write(self) -> None:
        if self._path is not None:
            self._path.write_text(json.dumps(self.as_dict(), indent=2) + "\n", encoding="utf-8")


def _of(kind: str, records: Sequence[Record]) -> list[dict[str, Any]]:
    return [{name: value for name, value in found.items() if name != "kind"} for found in records if found["kind"] == kind]


def _rows(table: Any, part: dict[str, Any]) -> None:
    title = part["title"]
    checks, failed = part["checks"], [check for check in part["checks"] if not check["passed"]]
    ended = "" if part["ended"] == "done" else f"{part['ended']}: {part['reason']}"
    if checks:
        table.add_row(title, f"{len(checks)} checks", f"{len(checks) - len(failed)} passed", "", "", "no" if failed else "yes")
    for check in failed:
        table.add_row(title, f"FAILED {check['name']}: {check['detail']}", "", "", "", "no")
    for figure in part["figures"]:
        measured = "rehearsed" if figure["value"] is None else f"{figure['value']:,g} {figure['unit']}"
        bound = "" if figure["bound"] is None else f"{figure['held_to']} {figure['bound']:,g}"
        reached = {None: "", True: "yes", False: "no"}[figure["reached"]]
        table.add_row(title, figure["name"], measured, bound, "" if figure["ratio"] is None else f"{figure['ratio']:g}", reached)
    for note in part["notes"]:
        table.add_row(title, note, "", "", "", "")
    if ended:
        table.add_row(title, ended, "", "", "", "")
    if not (checks or part["figures"] or part["notes"] or ended):
        table.add_row(title, f"done in {part['seconds']:g} s", "", "", "", "")
