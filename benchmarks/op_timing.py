"""How the op benchmarks time a call and report it."""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minivllm_plugin.bench.report import Report, check_writable, median
from minivllm_plugin.bench.table import show_report
from minivllm_plugin.errors import ConfigError

__all__ = ["finish", "parser", "report_path", "seconds_of"]

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
    made.add_argument("--json", type=report_path, help="write the report here")
    return made


def report_path(text: str) -> Path:
    """Of an option; what cannot be written is refused before minutes of measuring, not after."""
    path = Path(text)
    try:
        check_writable(path)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def finish(name: str, title: str, options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """Show the rows and write them."""
    settings = {key: value for key, value in vars(options).items() if key != "json"}
    show_report(Report(name, title, settings, rows, rows), options.json)
