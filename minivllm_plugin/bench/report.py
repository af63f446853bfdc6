"""What a benchmark returns: its figures, every run behind them, and where they were made. Written as JSON, shown as a table."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm_plugin.bench.machine import describe_command, describe_machine, describe_software
from minivllm_plugin.errors import ConfigError

if TYPE_CHECKING:
    from minivllm_plugin.serving.llm import LLM

__all__ = ["Report", "check_writable", "describe_engine", "engine_title", "median", "percentile", "significant"]

FORMAT = 1
"""Of the JSON. Raised when a reader of the old one would go wrong."""

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Report:
    """One benchmark.

    Attributes:
        benchmark: its name.
        title: what was measured, in half a line.
        settings: what was asked for, and what the engine made of it.
        summary: a row per figure, all with the same keys; medians over ``runs``.
        runs: every run, in the order in which they were made.
        facts: single figures beside the table.
        date: UTC, ISO 8601.
        command: what the process was started with.
    """

    benchmark: str
    title: str
    settings: Row
    summary: Sequence[Row]
    runs: Sequence[Row]
    facts: Row = field(default_factory=dict)
    machine: Row = field(default_factory=describe_machine)
    software: Row = field(default_factory=describe_software)
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    command: str = field(default_factory=describe_command)
    format: int = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"

    def write(self, path: Path) -> None:
        """Write the JSON, replacing what is there."""
        path.write_text(self.to_json(), encoding="utf-8")


def check_writable(path: Path | None) -> None:
    """Find out before minutes of measuring that the result could not be kept.

    Raises:
        ConfigError: the directory does not exist, or ``path`` is one.
    """
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise ConfigError(f"{path} cannot be written: its directory must exist and it must not be a directory itself")


def engine_title(llm: "LLM") -> str:
    """The model, and what computes it in which types."""
    return f"{llm.model_name}, {llm.dtype} weights on {llm.kernels} kernels"


def describe_engine(llm: "LLM") -> dict[str, Any]:
    """The engine's settings and what they came to on this machine."""
    import torch

    return {
        **asdict(llm.config),
        "resolved": {
            "device": llm.device,
            "kernels": llm.kernels,
            "weights": llm.dtype,
            "num_blocks": llm.num_blocks,
            "max_model_len": llm.max_model_len,
            "num_threads": llm.config.num_threads or torch.get_num_threads(),
        },
    }


def median(values: Sequence[float]) -> float:
    """The middle one, or the mean of the two in the middle."""
    return percentile(values, 50)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def significant(value: float, digits: int = 4) -> float:
    """Rounded to so many significant digits: what a timing can carry."""
    return float(f"{value:.{digits}g}")
