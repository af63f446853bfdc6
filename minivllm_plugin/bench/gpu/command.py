"""The command: one part after the other, each in a process of its own, the report written after every record, a table at the end.

Exit code 0: nothing that must be right is wrong; 1: something is, or a part that must come to its end did not; 2: no GPU, or a
wrong option. Speeds never decide it.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from minivllm_plugin.bench.gpu.parts import PARTS, Part
from minivllm_plugin.bench.gpu.records import Given, Record, read_records
from minivllm_plugin.bench.gpu.report import GpuReport
from minivllm_plugin.bench.machine import without_directories
from minivllm_plugin.bench.report import check_writable
from minivllm_plugin.errors import ConfigError

__all__ = ["main"]

NO_GPU = 2
BUDGET = 460.0  # of the eight minutes; the rest is for what stands between the parts
LOOK_EVERY = 0.2
SAID_AT_MOST = 600  # characters


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; see the top of this module for the exit code."""
    options = _options(arguments)
    if not options.rehearse and (reason := _no_gpu()) is not None:
        print(f"gpu_check: there is no GPU here to check: {reason}. --rehearse runs every part on the CPU, at tiny sizes.")
        return NO_GPU
    report = GpuReport(rehearse=options.rehearse, quick=options.quick, path=options.json)
    ends = time.monotonic() + options.budget
    wanted = [part for part in PARTS if not options.part or part.name in options.part]
    for part in wanted:
        left = ends - time.monotonic()
        if left < part.least and not options.rehearse:
            report.skip(part, f"{left:.0f} s of {options.budget:.0f} are left")
            continue
        given = Given(options.rehearse, options.quick, min(part.seconds, left), report.known())
        print(f"gpu_check: {part.title} ...", file=sys.stderr, flush=True)
        _run(part, given, report)
    report.show()
    return 0 if report.is_right else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="gpu_check", description="Check and measure the GPU path on this machine's GPU.")
    parser.add_argument("--json", type=_writable, metavar="FILE", help="the report, rewritten after every record")
    parser.add_argument("--quick", action="store_true", help="a smaller work load")
    parser.add_argument("--part", action="append", choices=[part.name for part in PARTS], help="only this one; may be repeated")
    parser.add_argument("--budget", type=float, default=BUDGET, metavar="S", help=f"seconds for all parts; default {BUDGET:g}")
    parser.add_argument(
        "--rehearse", action="store_true", help="no GPU: run everything on the CPU at tiny sizes; measures nothing"
    )
    return parser.parse_args(arguments)


def _writable(text: str) -> Path:
    path = Path(text)
    try:
        check_writable(path)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return path


def _no_gpu() -> str | None:
    """Why there is nothing to check."""
    try:
        import torch
    except ImportError as error:
        return f"torch does not import ({error})"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return None if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"


def _run(part: Part, given: Given, report: "GpuReport") -> None:
    """One part in its process: what it records goes to the report as it comes."""
    with tempfile.TemporaryDirectory() as directory:
        records, log = Path(directory, "records"), Path(directory, "log")
        command = _process_of(part, records, given)
        began = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_environment(part, given),
                start_new_session=True,  # so that what it starts ends with it
            )
        found: list[Record] = []
        try:
            while (code := _wait(process, LOOK_EVERY)) is None:
                found = _tell(report, part, records, found, began)
                if time.monotonic() - began > given.seconds:
                    break
        finally:
            _end(process)
        found = read_records(records)
        said = without_directories(log.read_text(encoding="utf-8", errors="replace")[-4 * SAID_AT_MOST :]).strip()
    seconds = time.monotonic() - began
    if code == 0:
        report.put(part, found, "done", seconds)
    elif code is None:
        report.put(part, found, "stopped", seconds, f"it was not done after {given.seconds:.0f} s")
    else:
        report.put(part, found, "broken", seconds, f"exit {code}: {said[-SAID_AT_MOST:]}")


def _process_of(part: Part, records: Path, given: Given) -> list[str]:
    """What starts it."""
    return [sys.executable, "-m", "minivllm_plugin.bench.gpu.parts", part.name, str(records), json.dumps(asdict(given))]


def _tell(report: "GpuReport", part: Part, path: Path, before: list[Record], began: float) -> list[Record]:
    found = read_records(path)
    if len(found) > len(before):
        report.put(part, found, "running", time.monotonic() - began)
    return found


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End it with everything that it has started."""
    with suppress(ProcessLookupError, PermissionError):  # all of it has ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(part: Part, given: Given) -> Mapping[str, str]:
    """Of a part's process: the choice of kernels is ours, not that of whoever runs this."""
    environment: dict[str, Any] = {
        name: value for name, value in os.environ.items() if name not in ("MINIVLLM_KERNELS", "TRITON_INTERPRET")
    }
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if given.rehearse:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **part.rehearsed_with}
    return environment
