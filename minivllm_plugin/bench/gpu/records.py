"""What a part of the check says: checks that passed or not, figures beside what they are held against, facts, and notes.

Written by the part's process as JSON lines, each at once; read by the command. In a rehearsal a figure has no value: a CPU says
nothing about a GPU, so that only its being a number is looked at.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

from minivllm_plugin.bench.report import significant

__all__ = ["Given", "Record", "Recorder", "read_records"]

Record = Mapping[str, Any]
Bound = Literal["floor", "at least", "at most"]


@dataclass(frozen=True, slots=True)
class Given:
    """What a part is told.

    Attributes:
        rehearse: on the CPU, at tiny sizes, through the reference or Triton's interpreter.
        quick: a smaller work load.
        seconds: what the part may take; one that knows it would take longer does less.
        known: facts of the parts before it, by name; bandwidths in bytes/s, the matrix rate in FLOP/s.
    """

    rehearse: bool = False
    quick: bool = False
    seconds: float = 60.0
    known: Mapping[str, Any] = field(default_factory=dict)

    @property
    def device(self) -> str:
        return "cpu" if self.rehearse else "cuda"


class Recorder:
    """Writes the records of one part.

    Args:
        file: where to; None keeps them only.
        rehearse: figures lose their values.
    """

    def __init__(self, file: IO[str] | None = None, *, rehearse: bool = False) -> None:
        self.records: list[Record] = []
        self._file = file
        self._rehearse = rehearse

    def check(self, name: str, passed: bool, detail: str = "") -> None:
        """Something that must be so, on any device."""
        self._write({"kind": "check", "name": name, "passed": bool(passed), "detail": detail})

    def figure(
        self, name: str, value: float, unit: str, bound: float | None = None, held_to: Bound = "floor", share: float = 0
    ) -> None:
        """Something measured.

        Args:
            bound: in the same unit: the least that is possible (``floor``), or a goal.
            share: of a floor, what is to be reached; 0: any.

        Raises:
            ValueError: no positive number was measured.
        """
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} came out as {value} {unit}")
        ratio = reached = None
        if bound is not None:
            # Above 1 is better than asked for; of a floor, the share of it that is reached.
            ratio = value / bound if held_to == "at least" else bound / value
            reached = ratio >= share if share else ratio >= 1 if held_to != "floor" else None
            ratio = significant(ratio, 3)
        if self._rehearse:
            value, ratio, reached = math.nan, None, None
        self._write(
            {
                "kind": "figure",
                "name": name,
                "value": None if math.isnan(value) else significant(value),
                "unit": unit,
                "bound": None if bound is None or (self._rehearse and held_to == "floor") else significant(bound),
                "held_to": None if bound is None else f"{share:.0%} of the floor" if share else held_to,
                "ratio": ratio,
                "reached": reached,
            }
        )

    def fact(self, name: str, value: Any) -> None:
        """Something about the machine, or that a later part wants to know."""
        self._write({"kind": "fact", "name": name, "value": value})

    def note(self, text: str) -> None:
        """Why something was left out, or done otherwise."""
        self._write({"kind": "note", "text": text})

    def _write(self, record: Record) -> None:
        self.records.append(record)
        if self._file is not None:
            self._file.write(json.dumps(record) + "\n")
            self._file.flush()


def read_records(path: Path) -> list[Record]:
    """What a part has said so far; a line that is only half there is left for the next time."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
