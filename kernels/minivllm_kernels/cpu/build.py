"""Building the library with the system's C++ compiler: on first use, once per source, compiler and machine, kept on disk.

Two processes may build at once: each writes a file of its own and renames it, so whoever comes last replaces it by its equal.
``MINIVLLM_CPU_ISA`` forces an instruction set; ``CXX`` names the compiler, with arguments if need be.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from minivllm_kernels.dispatch import KernelUnavailableError

__all__ = ["ISAS", "InstructionSet", "build_library", "kernel_cache_directory", "missing_features", "wanted_isa"]

SOURCES = Path(__file__).parent / "src"
MAIN = "decoder.cpp"
COMPILERS = ("c++", "g++", "clang++")
BASE_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-Wno-psabi")
BUILD_SECONDS = 600


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """How a compiler is asked for it, and what /proc/cpuinfo says of a processor that has it."""

    flags: tuple[str, ...]
    features: tuple[str, ...] = ()


V3 = ("avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "abm")
V4 = (*V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
IS_ARM = platform.machine() in ("aarch64", "arm64")
ISAS: dict[str, InstructionSet] = {
    "native": InstructionSet(("-mcpu=native",) if IS_ARM else ("-march=native",)),  # whatever the machine has
    "avx512bf16": InstructionSet(("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), (*V4, "avx512_vnni", "avx512_bf16")),
    "avx512vnni": InstructionSet(("-march=x86-64-v4", "-mavx512vnni"), (*V4, "avx512_vnni")),
    "avx512": InstructionSet(("-march=x86-64-v4",), V4),
    "avxvnni": InstructionSet(("-march=x86-64-v3", "-mavxvnni"), (*V3, "avx_vnni")),
    "avx2": InstructionSet(("-march=x86-64-v3",), V3),
    "sdot": InstructionSet(("-march=armv8.2-a+dotprod",), ("asimd", "asimddp")),
    "neon": InstructionSet(("-march=armv8-a",), ("asimd",)),
    "scalar": InstructionSet(()),  # plain C: SSE2 on x86, where every compiler has it
}


def wanted_isa() -> str:
    """``MINIVLLM_CPU_ISA``, else ``native``."""
    return os.environ.get("MINIVLLM_CPU_ISA") or "native"


def missing_features(isa: str) -> list[str]:
    """What this processor lacks for ``isa``; empty where the system does not say (not Linux)."""
    lines = [line for line in _processor().splitlines() if line.startswith(("flags", "Features"))]
    has = set(lines[0].partition(":")[2].split()) if lines else None
    return [feature for feature in ISAS[isa].features if has is not None and feature not in has]


def build_library(isa: str | None = None, *, compiler: str | None = None, extra_flags: tuple[str, ...] = ()) -> Path:
    """The library's path, built now if it is not there. It need not run on this machine.

    Args:
        isa: a key of :data:`ISAS`; None takes :func:`wanted_isa`.
        compiler: command; None takes ``CXX``, else the first of c++, g++, clang++.

    Raises:
        KernelUnavailableError: unknown instruction set, no compiler, a failing build, or nowhere to write.
    """
    isa = isa or wanted_isa()
    if isa not in ISAS:
        raise KernelUnavailableError(f"MINIVLLM_CPU_ISA={isa!r} is unknown; known are {', '.join(ISAS)}")
    command = _compiler(compiler)
    flags = (*BASE_FLAGS, *ISAS[isa].flags, *(_tuning() if isa == "native" else ()), *extra_flags)
    directory = kernel_cache_directory()
    try:
        target = directory / f"decoder-{isa}-{_key(command, flags)}.so"
        if not target.exists():
            _build(command, flags, target)
        return target
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailableError(f"the CPU kernels could not be built in {directory}: {error}") from error


def kernel_cache_directory() -> Path:
    """``kernels`` below ``$MINIVLLM_CACHE``, ``$XDG_CACHE_HOME/minivllm`` or ``~/.cache/minivllm``."""
    own, xdg = os.environ.get("MINIVLLM_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser().absolute() / "kernels"
    base = Path(xdg) if xdg and os.path.isabs(xdg) else Path("~/.cache").expanduser()
    return base / "minivllm" / "kernels"


def _compiler(named: str | None) -> list[str]:
    """The compiler's path and the arguments that go with it."""
    asked = named or os.environ.get("CXX")
    candidates = (asked,) if asked else COMPILERS
    for candidate in candidates:
        words = shlex.split(candidate)
        found = shutil.which(words[0]) if words else None
        if found:
            return [found, *words[1:]]
    raise KernelUnavailableError(
        f"no C++ compiler ({', '.join(candidates)}) was found; install g++ or clang to get the fast CPU path"
    )


def _key(command: list[str], flags: tuple[str, ...]) -> str:
    """Of everything the result depends on; for a native build that includes the processor."""
    digest = hashlib.sha256()
    for path in (SOURCES / MAIN, *sorted(SOURCES.glob("*.h"))):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    status = os.stat(command[0])
    for part in (*command, str(status.st_size), str(status.st_mtime_ns), *flags, _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _tuning() -> tuple[str, ...]:
    """Intel's server processors sum pairs of bfloat16 at half the rate of floats; multiply-adds give the same bits sooner."""
    return ("-DSPLIT_PAIRS",) if "GenuineIntel" in _processor() else ()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("vendor_id", "model name", "flags", "Features", "CPU part", "CPU implementer")
        return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"


def _build(command: list[str], flags: tuple[str, ...], target: Path) -> None:
    print(f"minivllm: compiling the CPU kernels with {command[0]} (once, some seconds) ...", file=sys.stderr, flush=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
        result = Path(scratch) / target.name
        done = subprocess.run(
            [*command, *flags, str(SOURCES / MAIN), "-o", str(result)],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            timeout=BUILD_SECONDS,
            check=False,
        )
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
            raise KernelUnavailableError(f"{command[0]} could not build the CPU kernels: {first}")
        with result.open("rb") as file:
            os.fsync(file.fileno())  # or a power cut leaves a name without content, which no later start would repair
        os.replace(result, target)
