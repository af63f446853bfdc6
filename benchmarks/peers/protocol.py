"""What every contestant's script shares: read a job, open the engine, run the cases in order, print what each took.

Runs inside the peers' own environments, so it knows the standard library only. ``benchmarks/peers.py`` writes the job and reads
the lines: READY when the engine could take a request, VERSIONS, RESULT per case, MEMORY at the end.

A job is JSON: ``threads``, ``max_model_len``, ``prefix_caching``, ``warm_up`` and ``cases``. A case has ``name``, ``prompts``
(lists of token ids), ``outputs`` (new tokens of each, exactly), and perhaps ``remembered``: a prefix to be computed beforehand.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

__all__ = ["Engine", "contest"]


class Engine(Protocol):
    """An engine under test."""

    def generate(self, prompts: Sequence[Sequence[int]], outputs: Sequence[int], name: str) -> int:
        """Continue all prompts at once, greedily, by exactly so many tokens; the number of new tokens."""
        ...

    def remember(self, prefix: Sequence[int], name: str) -> None:
        """Compute a prefix that the prompts of the next case begin with."""
        ...


def contest(open_engine: Callable[[argparse.Namespace, dict[str, Any]], Engine], packages: Sequence[str]) -> None:
    """Run the job that the command line names.

    Args:
        open_engine: gets the options and the job.
        packages: whose versions are told.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="what this engine loads")
    parser.add_argument("--format", required=True, help="of the weights, as the peer calls it")
    parser.add_argument("--dummy", action="store_true", help="random weights of this shape")
    parser.add_argument("--option", action="append", default=[], help="KEY=VALUE, a further setting")
    parser.add_argument("--job", required=True, type=Path, help="JSON file")
    options = parser.parse_args()
    job = json.loads(options.job.read_text())
    engine = open_engine(options, job)
    print("READY", flush=True)
    print("VERSIONS", json.dumps({name: version(name) for name in packages}), flush=True)
    engine.generate(job["warm_up"]["prompts"], job["warm_up"]["outputs"], "warm up")
    for case in job["cases"]:
        if case.get("remembered"):
            engine.remember(case["remembered"], case["name"])
        started = time.perf_counter()
        tokens = engine.generate(case["prompts"], case["outputs"], case["name"])
        seconds = time.perf_counter() - started
        if tokens != sum(case["outputs"]):
            raise SystemExit(f"{case['name']}: {tokens} tokens came, {sum(case['outputs'])} were asked for")
        print("RESULT", json.dumps({"case": case["name"], "seconds": seconds, "output_tokens": tokens}), flush=True)
    print("MEMORY", json.dumps({"peak_bytes": _peak_bytes()}), flush=True)


def _peak_bytes() -> int | None:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), None)
