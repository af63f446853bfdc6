"""Measures everything that ``docs/performance.md`` shows, piece by piece, then writes its tables.

    python benchmarks/run_all.py --openvino OV/bin/python --llama-cpp LC/bin/python --list
    python benchmarks/run_all.py --openvino OV/bin/python --llama-cpp LC/bin/python

Leave the machine alone meanwhile. A result younger than ``--keep-hours`` is kept, so the same command goes on where it was
stopped; ``--within`` starts no piece that is not expected to end in so many seconds. What fails is named at the end and keeps the
result that it had.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import write_tables
from pieces import Peers, Piece, pieces

__all__ = ["main"]

ROOT = Path(__file__).parents[1]


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    chosen = [piece for piece in pieces(_peers(options)) if not options.only or piece.name in options.only]
    if options.list:
        _show(chosen)
        return
    options.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    failed, left = [], []
    for piece in chosen:
        target = options.out / f"{piece.name}.json"
        if piece.missing:
            print(f"{piece.name}: left out, {piece.missing}", flush=True)
        elif _age_hours(target) < options.keep_hours:
            print(f"{piece.name}: there, {_age_hours(target):.1f} hours old", flush=True)
        elif options.within and time.monotonic() - begun + piece.seconds > options.within:
            left.append(piece.name)
        elif not _run(piece, target, options.limit):
            failed.append(piece.name)
    write_tables.main(["--results", str(options.out), "--page", str(options.page)])
    if left:
        print(f"no time for {', '.join(left)}: run the same again")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _run(piece: Piece, target: Path, limit: float) -> bool:
    """Whether it came to a result. An earlier one is replaced only by a whole new one."""
    print(f"{piece.name}: about {piece.seconds} s", flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        fresh = Path(scratch) / target.name
        log = Path(scratch) / "log.txt"
        code = _code_of([*piece.command, "--json", str(fresh)], log, limit)
        if code == 0 and fresh.is_file():
            target.write_bytes(fresh.read_bytes())
            print(f"{piece.name}: done in {time.monotonic() - started:.0f} s", flush=True)
            return True
        why = f"took more than {limit:g} s" if code is None else f"ended with {code}"
        print(f"{piece.name}: {why}\n{log.read_text(errors='replace')[-1500:]}", flush=True)
    return False


def _code_of(command: Sequence[str], log: Path, limit: float) -> int | None:
    """Its exit code; None if it took too long. However this ends, neither it nor a process that it started goes on."""
    with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True) as process:
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def _age_hours(path: Path) -> float:
    """By the report's own date: that of the file is when it was checked out."""
    if not path.is_file():
        return float("inf")
    made = datetime.fromisoformat(json.loads(path.read_text(encoding="utf-8"))["date"])
    return (datetime.now(UTC) - made).total_seconds() / 3600


def _show(chosen: Sequence[Piece]) -> None:
    for piece in chosen:
        print(f"{piece.name:24} {piece.seconds:4} s{f'  ({piece.missing})' if piece.missing else ''}")
    print(f"{'in all':24} {sum(piece.seconds for piece in chosen):4} s")


def _peers(options: argparse.Namespace) -> Peers:
    return Peers(options.openvino, options.llama_cpp, options.rounds)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results", help="directory of the reports")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md", help="whose tables are written")
    parser.add_argument("--openvino", metavar="PYTHON", help="of an environment with openvino-genai")
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="of an environment with llama-cpp-python")
    parser.add_argument("--rounds", type=int, default=3, help="of each contest with a peer")
    parser.add_argument("--only", metavar="PIECE", nargs="+", action="extend", help="these pieces; see --list")
    parser.add_argument("--keep-hours", type=float, default=3.0, help="results younger than this are kept; 0: none is")
    parser.add_argument("--within", type=float, metavar="SECONDS", help="start nothing that would end later than this")
    parser.add_argument("--limit", type=float, default=240, help="seconds after which a piece is ended and counts as failed")
    parser.add_argument("--list", action="store_true", help="pieces and how long they take; run nothing")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or what it started would go on
    main()
