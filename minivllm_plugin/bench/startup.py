"""From nothing to the first token, each time in a fresh process. Files are cached: one unmeasured start comes first."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from minivllm_plugin.bench.report import Report, median, significant
from minivllm_plugin.bench.startup_probe import MARK
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import EngineError

__all__ = ["measure_startup"]

SECONDS_PER_START = 900  # the first one may fetch, convert, compile and pack
PHASES = (
    ("interpreter", "spawned", "started"),
    ("import minivllm_plugin.LLM", "started", "imported"),
    ("LLM(): other imports, weights, pool", "imported", "ready"),
    ("first token", "request_made", "first_token"),
    ("engine ready, in all", "spawned", "ready"),
)


def measure_startup(model: str, options: Mapping[str, Any], *, repeat: int = 5) -> Report:
    """Start ``repeat`` times.

    Args:
        options: of :class:`~minivllm_plugin.config.EngineConfig`; checked before any process is started.

    Raises:
        ConfigError: an option is wrong.
        EngineError: a process failed; the message ends with what it said.
    """
    EngineConfig.from_options(model, dict(options))
    first = _start(model, options)
    runs = [_start(model, options) for _ in range(repeat)]
    summary = []
    for phase, begin, end in PHASES:
        seconds = [run["moments"][end] - run["moments"][begin] for run in runs]
        summary.append(
            {
                "phase": phase,
                "seconds": significant(median(seconds), 3),
                "fastest_s": significant(min(seconds), 3),
                "slowest_s": significant(max(seconds), 3),
                "unmeasured_first_s": significant(first["moments"][end] - first["moments"][begin], 3),
            }
        )
    settings = {"engine": {"model": model, **options, "resolved": first["about"]}, "repeat": repeat}
    title = f"{model}, {first['about']['weights']} weights on {first['about']['kernels']} kernels"
    return Report("startup", title, settings, summary, [first, *runs])


def _start(model: str, options: Mapping[str, Any]) -> dict[str, Any]:
    command = [sys.executable, "-m", "minivllm_plugin.bench.startup_probe", json.dumps({"model": model, **options})]
    spawned = time.time()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_PER_START, check=False)
    except subprocess.TimeoutExpired as error:
        raise EngineError(f"an engine for {model!r} did not start within {SECONDS_PER_START} s") from error
    if done.returncode:
        raise EngineError(f"an engine for {model!r} could not start: {_last_line(done.stderr.splitlines())}")
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith(MARK))
    run: dict[str, Any] = json.loads(line.removeprefix(MARK))
    run["moments"]["spawned"] = spawned
    return run


def _last_line(lines: Sequence[str]) -> str:
    return next((line for line in reversed(lines) if line.strip()), "it said nothing")
