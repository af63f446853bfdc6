"""How the op benchmarks time a call and report it."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minivllm_plugin.bench.report import Report, median
from minivllm_plugin.bench.table import show_report

__all__ = ["finish", "parser", "seconds_of"]

LEAST_CALLS = 5


def seconds_of(call: Callable[[], object], at_least: float) -> float:
    """Median seconds of one call, over as many as fill ``at_least`` seconds, after one that is not counted."""
    call()
    taken: list[float] = []
    while len(taken) < LEAST_CALLS or sum(taken) < at_least:
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return median(taken)


def parser(text: str | None) -> argparse.ArgumentParser:
    """With the options that every op benchmark has."""
    import torch

    made = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--threads", type=int, default=torch.get_num_threads())
    made.add_argument("--seconds", type=float, default=0.3, help="spent on each figure")
    made.add_argument("--json", type=Path, help="write the report here")
    return made


def finish(name: str, title: str, options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Show the rows and write them."""
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    show_report(Report(name, title, settings, rows, rows), options.json)
