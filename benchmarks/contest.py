"""A contest of engines: who takes part, one process of one contestant, and ratios between neighbours in time.

Knows nothing of what the jobs ask (``peer_jobs.py``) nor of where peers come from (``peers.py``).
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer_files import SCRIPTS

from minivllm_plugin.bench.machine import without_directories
from minivllm_plugin.bench.report import median, significant

__all__ = ["Contestant", "ContestantError", "Heat", "Job", "Outcome", "compare", "run_contestant", "run_heats"]

SECONDS_PER_RUN = 1800
SAID = 2000  # characters of a failed process that are shown

Job = Mapping[str, Any]
Figure = dict[str, Any]


class ContestantError(Exception):
    """A contestant did not get through its job. The message is what it said, and in the last line who it was."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine in one format: the script that runs it, by which Python, on which file.

    Attributes:
        options: further settings that its script knows, each ``KEY=VALUE``.
    """

    engine: str
    format: str
    python: str
    script: str
    model: str
    dummy: bool = False
    options: tuple[str, ...] = ()

    @property
    def mode(self) -> str:
        return " ".join((self.format, *self.options))

    @property
    def name(self) -> str:
        return f"{self.engine} {self.mode}"


@dataclass(frozen=True, slots=True)
class Heat:
    """A peer, and the modes of this engine that run beside it in every round."""

    peer: Contestant
    ours: tuple[Contestant, ...]

    def order(self, turn: int) -> tuple[Contestant, ...]:
        """Who runs after whom: the other way round every second round."""
        everybody = (*self.ours, self.peer)
        return everybody if turn % 2 else everybody[::-1]


@dataclass(slots=True)
class Outcome:
    """What came of a contest.

    Attributes:
        runs: every figure, with its ``round``, ``heat`` and ``contestant``.
        failed: why whom is left out.
        versions: of each engine's packages.
    """

    runs: list[dict[str, Any]] = field(default_factory=list)
    failed: dict[Contestant, str] = field(default_factory=dict)
    versions: dict[str, Mapping[str, str]] = field(default_factory=dict)


def run_heats(heats: Sequence[Heat], jobs: Sequence[Job], warm_up: Job, rounds: int) -> Outcome:
    """Every heat once a round, after a start of everybody that is not counted: it makes whatever is made once.

    Who fails once runs no more, while the others still count.
    """
    outcome = Outcome()
    for contestant in dict.fromkeys(contestant for heat in heats for contestant in heat.order(1)):
        _run_jobs(contestant, [warm_up], 0, outcome)
    for turn in range(1, rounds + 1):
        for index, heat in enumerate(heats):
            for contestant in heat.order(turn) if heat.peer not in outcome.failed else ():
                where = {"round": turn, "heat": index, "contestant": contestant.name}
                outcome.runs += [{**where, **figure} for figure in _run_jobs(contestant, jobs, turn, outcome)]
    return outcome


def run_contestant(contestant: Contestant, job: Job) -> tuple[list[Figure], dict[str, str]]:
    """One fresh process: what each case took, how long until it was ready, its peak of memory; and its packages' versions.

    Each figure has ``case``, ``value`` and ``unit``; more is better of ``tok/s``, less of ``s`` and ``MB``.

    Raises:
        ContestantError: the process failed.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "job.json"
        path.write_text(json.dumps(job))
        command = [contestant.python, str(SCRIPTS / contestant.script), "--model", contestant.model]
        command += ["--format", contestant.format, "--job", str(path), *(["--dummy"] if contestant.dummy else [])]
        for option in contestant.options:
            command += ["--option", option]
        log = Path(scratch) / "log.txt"
        figures: list[Figure] = []
        versions: dict[str, str] = {}
        with log.open("w") as errors:
            spawned = time.time()
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
                watchdog = threading.Timer(SECONDS_PER_RUN, process.kill)
                watchdog.start()
                assert process.stdout is not None
                for line in process.stdout:
                    figures += _figures(line, job, time.time() - spawned)
                    if line.startswith("VERSIONS "):
                        versions = json.loads(line.removeprefix("VERSIONS "))
                watchdog.cancel()
        if process.returncode:
            said = log.read_text().rstrip()[-SAID:]
            last = without_directories("".join(said.splitlines()[-1:]))
            raise ContestantError(f"{said}\n{contestant.name} failed with {process.returncode}: {last}")
    return figures, versions


def compare(runs: Sequence[Mapping[str, Any]], heat: int, ours: Contestant, peer: Contestant) -> list[dict[str, Any]]:
    """A row per case: medians of both, and the median of the ratios, each of one round; above 1 this engine is better."""
    values: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for run in runs:
        if run["heat"] == heat and run["contestant"] in (ours.name, peer.name):
            sides = values.setdefault((run["case"], run["unit"]), {ours.name: {}, peer.name: {}})
            sides[run["contestant"]][run["round"]] = run["value"]
    rows = []
    for (case, unit), sides in values.items():
        mine, theirs = sides[ours.name], sides[peer.name]
        ratios = [
            mine[turn] / theirs[turn] if unit == "tok/s" else theirs[turn] / mine[turn] for turn in mine.keys() & theirs.keys()
        ]
        if not ratios:  # one of the two never got there
            continue
        rows.append(
            {
                "peer": peer.name,
                "ours": ours.mode,
                "case": case,
                "unit": unit,
                "ours_median": significant(median(list(mine.values()))),
                "peer_median": significant(median(list(theirs.values()))),
                "ratio": significant(median(ratios), 3),
                "ratio_least": significant(min(ratios), 3),
                "ratio_most": significant(max(ratios), 3),
            }
        )
    return rows


def _run_jobs(contestant: Contestant, jobs: Sequence[Job], turn: int, outcome: Outcome) -> list[Figure]:
    found: list[Figure] = []
    for job in jobs if contestant not in outcome.failed else ():
        print(f"round {turn}: {contestant.name}, {job['name']}", file=sys.stderr, flush=True)
        try:
            figures, versions = run_contestant(contestant, job)
        except ContestantError as error:
            print(error, file=sys.stderr)
            outcome.failed[contestant] = str(error).splitlines()[-1]
            return []
        found += figures
        outcome.versions[contestant.engine] = versions
    return found


def _figures(line: str, job: Job, elapsed: float) -> Iterator[Figure]:
    word, _, rest = line.partition(" ")
    # These two are taken once a process. With dummy weights they tell nothing: some make them, others read a file.
    counts = job["name"] == "offline" and not job["dummy"]
    if word.strip() == "READY" and counts:
        yield {"case": "ready", "unit": "s", "value": elapsed}
    elif word == "MEMORY" and counts:
        peak = json.loads(rest)["peak_bytes"]
        if peak is not None:
            yield {"case": "peak memory", "unit": "MB", "value": peak / 1e6}
    elif word == "RESULT":
        result = json.loads(rest)
        case = next(case for case in job["cases"] if case["name"] == result["case"])
        tokens = sum(map(len, case["prompts"])) if case["counts"] == "input" else result["output_tokens"]
        yield {"case": result["case"], "unit": "tok/s", "value": tokens / result["seconds"]}
