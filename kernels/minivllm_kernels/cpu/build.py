"""Building the library with the system's C++ compiler: on first use, once per source, compiler and machine, kept on disk.

Two processes may build at once: each writes a file of its own and renames it, so whoever comes last replaces it by its equal.
``MINIVLLM_CPU_ISA`` forces an instruction set; ``CXX`` names the compiler.
"""

import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

from minivllm_kernels.dispatch import KernelUnavailableError

__all__ = ["ISAS", "build_library", "kernel_cache_directory"]

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "src"
MAIN = "decoder.cpp"
COMPILERS = ("c++", "g++", "clang++")
BASE_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-Wno-psabi")
BUILD_SECONDS = 600

# What each instruction set is called here and how a compiler is asked for it. "native" is whatever the machine has.
ISAS: dict[str, tuple[str, ...]] = {
    "native": ("-march=native",),
    "avx512vnni": ("-march=x86-64-v4", "-mavx512vnni"),
    "avxvnni": ("-march=x86-64-v3", "-mavxvnni"),
    "avx2": ("-march=x86-64-v3",),
    "scalar": (),
    "sdot": ("-march=armv8.2-a+dotprod",),
}


def build_library(isa: str | None = None, *, compiler: str | None = None, extra_flags: tuple[str, ...] = ()) -> Path:
    """The library's path, built now if it is not there.

    Args:
        isa: a key of :data:`ISAS`; None takes ``MINIVLLM_CPU_ISA``, else ``native``.
        compiler: command; None takes ``CXX``, else the first of c++, g++, clang++.

    Raises:
        KernelUnavailableError: unknown instruction set, no compiler, a failing build, or nowhere to write.
    """
    isa = isa or os.environ.get("MINIVLLM_CPU_ISA") or "native"
    if isa not in ISAS:
        raise KernelUnavailableError(f"MINIVLLM_CPU_ISA={isa!r} is unknown; known are {', '.join(ISAS)}")
    command = _compiler(compiler)
    flags = (*BASE_FLAGS, *ISAS[isa], *extra_flags)
    target = kernel_cache_directory() / f"decoder-{isa}-{_key(command, flags)}.so"
    if not target.exists():
        _build(command, flags, target)
    return target


def kernel_cache_directory() -> Path:
    """``kernels`` below ``$MINIVLLM_CACHE``, ``$XDG_CACHE_HOME/minivllm`` or ``~/.cache/minivllm``."""
    own, xdg = os.environ.get("MINIVLLM_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own).expanduser().absolute() / "kernels"
    base = Path(xdg) if xdg and os.path.isabs(xdg) else Path("~/.cache").expanduser()
    return base / "minivllm" / "kernels"


def _compiler(named: str | None) -> str:
    candidates = (named,) if named else (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    for candidate in candidates:
        found = shutil.which(candidate)
        if found:
            return found
    raise KernelUnavailableError(
        f"no C++ compiler ({', '.join(candidates)}) was found; install g++ or clang to get the fast CPU path"
    )


def _key(command: str, flags: tuple[str, ...]) -> str:
    """Of everything the result depends on; for a native build that includes the processor."""
    digest = hashlib.sha256()
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    status = os.stat(command)
    for part in (command, str(status.st_size), str(status.st_mtime_ns), *flags, _processor()):
        digest.update(part.encode() + b"\0")
    return digest.hexdigest()[:20]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("model name", "flags", "Features", "CPU part", "CPU implementer")
        return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
    except OSError:  # not Linux
        return f"{platform.machine()} {platform.processor()}"


def _build(command: str, flags: tuple[str, ...], target: Path) -> None:
    logger.info("building the CPU kernels with %s (once, a few seconds)", command)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=target.parent) as scratch:
            result = Path(scratch) / target.name
            done = subprocess.run(
                [command, *flags, str(SOURCES / MAIN), "-o", str(result)],
                capture_output=True,
                text=True,
                timeout=BUILD_SECONDS,
                check=False,
            )
            if done.returncode:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
                raise KernelUnavailableError(f"{command} could not build the CPU kernels: {first}")
            os.replace(result, target)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelUnavailableError(f"the CPU kernels could not be built in {target.parent}: {error}") from error
