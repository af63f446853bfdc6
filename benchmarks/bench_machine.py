"""Floors of this machine: how fast it reads memory and multiplies. What no kernel can beat.

    python benchmarks/bench_machine.py --megabytes 32 --megabytes 135 --megabytes 600

Sizes are those of weights: SmolLM2-135M in int8 is 135 MB, Qwen3-0.6B 600 MB. Shared caches make small sizes look fast.
"""

import argparse
import ctypes
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from op_timing import finish, parser

from minivllm_kernels.cpu.build import ISAS, SOURCES, wanted_isa
from minivllm_plugin.bench.report import median, significant

REPEAT = 7
PRODUCTS = 12 * 64  # bytes multiplied in one turn of machine_dot
PAIRED = 12 * 32
MULTIPLY_ADDS = 12 * 16


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    library = build_machine()
    rows = []
    for threads in dict.fromkeys((1, options.threads)):
        for megabytes in options.megabytes:
            rows.append(_row(f"read {megabytes} MB", threads, "GB/s", reads(library, megabytes, threads, options.seconds)))
        for what in PEAKS:
            rows.append(_row(what, threads, "G/s", peaks(library, what, threads, options.seconds)))
    finish("machine", f"floors with the {library.machine_isa().decode()} instruction set", options, rows)


PEAKS = {
    "int8 products": ("machine_dot", PRODUCTS),
    "bfloat16 products": ("machine_pairs", PAIRED),
    "float multiply-adds": ("machine_fma", MULTIPLY_ADDS),
}


def reads(library: ctypes.CDLL, megabytes: int, threads: int, seconds: float) -> list[float]:
    """GB/s of reading so much memory over and over, several times; about ``seconds`` are spent."""
    size = megabytes * 1_000_000 // (256 * threads) * 256 * threads
    data = torch.ones(size // 4)
    times = max(1, int(seconds * 5e9 / size / REPEAT))
    taken = [library.machine_read(data.data_ptr(), size, times, threads) for _ in range(REPEAT)]
    return [size * times / one / 1e9 for one in taken]


def peaks(library: ctypes.CDLL, what: str, threads: int, seconds: float) -> list[float]:
    """1e9 products a second of one of :data:`PEAKS`, several times."""
    function, each = PEAKS[what]
    turns = max(1, int(seconds * 2e8 / REPEAT))
    return [each * turns * threads / getattr(library, function)(turns, threads) / 1e9 for _ in range(REPEAT)]


def build_machine() -> ctypes.CDLL:
    """Compile machine.cpp for this processor and load it.

    Raises:
        SystemExit: no compiler, or it failed.
    """
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise SystemExit("a C++ compiler is needed (c++, g++ or clang++)")
    source = Path(__file__).with_name("machine.cpp")
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "machine.so"
        flags = ["-O3", "-std=c++20", "-fPIC", "-shared", "-pthread", "-Wno-psabi", *ISAS[wanted_isa()].flags, f"-I{SOURCES}"]
        done = subprocess.run([compiler, *flags, str(source), "-o", str(target)], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{shlex.join(done.args)} failed:\n{done.stderr[:2000]}")
        library = ctypes.CDLL(str(target))
    library.machine_isa.restype = ctypes.c_char_p
    library.machine_read.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int]
    for function in (library.machine_dot, library.machine_pairs, library.machine_fma):
        function.argtypes = [ctypes.c_long, ctypes.c_int]
    for function in (library.machine_read, library.machine_dot, library.machine_pairs, library.machine_fma):
        function.restype = ctypes.c_double
    return library


def _row(what: str, threads: int, unit: str, values: Sequence[float]) -> dict[str, object]:
    return {
        "what": what,
        "threads": threads,
        "unit": unit,
        "median": significant(median(values), 3),
        "best": significant(max(values), 3),
        "worst": significant(min(values), 3),
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--megabytes", type=int, action="append", help="size that is read; may be repeated")
    options = made.parse_args(arguments)
    options.megabytes = options.megabytes or [8, 32, 135, 600]
    return options


if __name__ == "__main__":
    main()
