"""Where and with what a measurement was made. A figure without this is no figure."""

import os
import platform
import re
import shlex
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

__all__ = ["describe_command", "describe_machine", "describe_software", "resident_memory", "without_directories"]

DIRECTORIES = re.compile(r"(?<![\w.…])~?/(?:[^\s/'\"]+/)+")
# Where results are written: they differ from the commit while the very measurement runs that writes them.
WRITTEN = (":(top,exclude)benchmarks/results", ":(top,exclude)docs")
PACKAGES = ("minivllm-plugin", "torch", "numpy", "tokenizers", "transformers")
FLAGS = (
    "avx2", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve",
)  # fmt: skip


def describe_machine() -> dict[str, Any]:
    """CPU model and features, usable cores, memory in bytes, system, and load averages (the measurement itself included)."""
    model, flags = _cpu()
    return {
        "cpu": model,
        "cpu_features": [flag for flag in FLAGS if flag in flags],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory_bytes": _memory_bytes(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average": [round(load, 2) for load in os.getloadavg()] if hasattr(os, "getloadavg") else None,
    }


def describe_command() -> str:
    """What this process was started with, to be typed again; of absolute paths the last part only."""
    program = Path(sys.argv[0])
    root = Path(__file__).resolve().parents[2]
    is_script = program.suffix == ".py" and root in program.resolve().parents
    name = f"python {program.resolve().relative_to(root).as_posix()}" if is_script else program.name
    return " ".join([name, *(without_directories(shlex.quote(argument)) for argument in sys.argv[1:])])


def without_directories(text: str) -> str:
    """The text with absolute paths cut to their last part: what was where on this machine concerns nobody."""
    return DIRECTORIES.sub("…/", text)


def describe_software() -> dict[str, Any]:
    """Versions, and the commit when this code lies in a git checkout (``-dirty`` with changes that are not committed)."""
    found: dict[str, Any] = {"python": platform.python_version(), "commit": _commit()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def resident_memory() -> dict[str, int | None]:
    """Bytes of this process in memory now and at most so far, and the parts that are its own and that are mapped files.

    Mapped files (weights) count as resident but can be dropped by the system. None where it is not told (not Linux).
    """
    wanted = {"VmRSS": "resident", "VmHWM": "peak", "RssAnon": "own", "RssFile": "files"}
    found: dict[str, int | None] = dict.fromkeys(wanted.values())
    try:
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        name, _, value = line.partition(":")
        if name in wanted:
            found[wanted[name]] = int(value.split()[0]) * 1024
    return found


def _cpu() -> tuple[str, frozenset[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or "unknown", frozenset()
    fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    flags = fields.get("flags") or fields.get("features") or ""
    return fields.get("model name") or platform.processor() or "unknown", frozenset(flags.split())


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every platform
        return None


def _commit() -> str | None:
    here = Path(__file__).resolve()
    # An installation inside somebody else's checkout must not report their commit: this very file has to be tracked.
    if _git("ls-files", "--error-unmatch", here.name) is None:
        return None
    commit = _git("rev-parse", "--short=12", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ":(top)", *WRITTEN)
    return None if commit is None else commit + ("-dirty" if changes else "")


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).resolve().parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git here
        return None
    return done.stdout.strip() if done.returncode == 0 else None
