"""Compiling every kernel and configuration ahead of time, without a device, and what the compiler says of each.

    python -m minivllm_kernels.triton.compilation [--json FILE] [--target 90] [NAME …]

prints one line a case and target: registers a thread, bytes spilled, shared memory, the widest load, size of the binary. Exits
with 1 when a case spills more than it may, or asks for more shared memory than there is. Owns no kernel: each op's file lists
its own ``COMPILE_CASES``. Needs triton's compiler, so the command takes TRITON_INTERPRET out of its environment.
"""

import argparse
import contextlib
import importlib
import io
import json
import os
import pkgutil
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["TARGETS", "CompileCase", "Compiled", "all_cases", "compile_case", "excess", "main", "table"]

TARGETS = (80, 90, 100)
"""Compute capabilities times ten: A100, H100 and H200, B200."""

SHARED_LIMITS = {80: 166912, 90: 232448, 100: 232448}
"""Bytes of shared memory that a block may have: more compiles, and does not launch."""

RESOURCES = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.S)

LOADS = re.compile(r"ld\.global[a-zA-Z0-9_.:]*?(?:\.v(\d))?\.b(\d+)\b")
COPIES = re.compile(r"cp\.async\.c[ag]\.shared\.global[^;]*?\], *\[[^;]*?\], *(0x[0-9a-f]+|\d+)")


@dataclass(frozen=True)
class CompileCase:
    """One configuration in which a kernel can be launched.

    Attributes:
        name: op, dtypes, shape: what the report calls it.
        kernel: the ``@triton.jit`` function.
        signature: type of each argument that is no constexpr, by name: ``*bf16``, ``i32``, ``i64``, ``fp32``. Pointers are taken
            to be 16-byte aligned, as torch's allocations are. ``i32:16`` is an integer that a launch would find divisible by
            16, so that loads are vectorised as they would be; ``i32:1`` one that is 1, which a launch compiles in.
        constexprs: value of each constexpr argument, by name.
        num_warps, num_stages: as given at launch.
        targets: which of :data:`TARGETS` it is for.
        spill_limit: bytes of spill loads and stores that are accepted.
        reason: why targets are left out or spills accepted; empty where nothing of the kind is asked for.
        options: further options of the compiler, as given at launch.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int
    num_stages: int
    targets: Sequence[int] = TARGETS
    spill_limit: int = 0
    reason: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Compiled:
    """What came out of one case for one target.

    Attributes:
        registers: a thread's.
        spill_stores, spill_loads, stack: a thread's, in bytes.
        shared: bytes of shared memory a block.
        widest_load: bytes of the widest access to global memory; 16 is the most that a thread can ask for at once.
        binary: bytes of the cubin.
    """

    case: str
    target: int
    registers: int
    spill_stores: int
    spill_loads: int
    stack: int
    shared: int
    widest_load: int
    binary: int


def all_cases() -> list[CompileCase]:
    """``COMPILE_CASES`` of every module of this package, in the order of their names."""
    package = importlib.import_module("minivllm_kernels.triton")
    cases: list[CompileCase] = []
    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        cases += vars(importlib.import_module(module.name)).get("COMPILE_CASES", ())
    return cases


def compile_case(case: CompileCase, target: int) -> Compiled:
    """Compile for compute capability ``target / 10``, past triton's cache.

    Raises:
        RuntimeError: the process interprets kernels, so there is nothing to compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from minivllm_kernels.triton.launch import COMPILER_OPTIONS, interpreting

    if interpreting():
        raise RuntimeError("TRITON_INTERPRET was set when triton was imported; compile in a process without it")
    signature, constexprs, attributes = _specialised(case)
    source = ASTSource(fn=case.kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages, **COMPILER_OPTIONS, **case.options}
    log = io.StringIO()
    knobs = triton.knobs
    with knobs.compilation.scope(), knobs.nvidia.scope(), contextlib.redirect_stdout(log):
        # ptxas counts spills, but only its log says so, and a cached result has none.
        knobs.compilation.always_compile, knobs.nvidia.dump_ptxas_log = True, True
        kernel = triton.compile(source, target=GPUTarget("cuda", target, 32), options=options)
    found = RESOURCES.search(log.getvalue())
    if found is None:
        raise RuntimeError(f"{case.name}, sm_{target}: ptxas says nothing of registers and spills: {log.getvalue()!r}")
    stack, stores, loads, registers = (int(number) for number in found.groups())
    widest, size = _widest_load(kernel.asm["ptx"]), len(kernel.asm["cubin"])
    return Compiled(case.name, target, registers, stores, loads, stack, kernel.metadata.shared, widest, size)


def excess(case: CompileCase, result: Compiled) -> str | None:
    """What is wrong with the result, or None: more spilled than the case accepts, or more shared memory than the card has."""
    spilled, room = result.spill_stores + result.spill_loads, SHARED_LIMITS[result.target]
    if result.shared > room:
        return f"{case.name}, sm_{result.target}: {result.shared} bytes of shared memory, a block has {room}"
    if spilled > case.spill_limit:
        return f"{case.name}, sm_{result.target}: {spilled} bytes spilled, {case.spill_limit} accepted"
    return None


def table(results: Iterable[Compiled]) -> str:
    """A Markdown table, one line a case and target; spilled is stores and loads together."""
    lines = ["| case | target | registers | spilled | shared memory | widest load | binary |", "|---|---|---|---|---|---|---|"]
    for r in results:
        spilled = r.spill_stores + r.spill_loads
        lines.append(f"| {r.case} | sm_{r.target} | {r.registers} | {spilled} | {r.shared} | {r.widest_load} | {r.binary} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 0: everything compiled and nothing spilled beyond what is accepted."""
    parser = argparse.ArgumentParser(prog="python -m minivllm_kernels.triton.compilation", description="compile every kernel")
    parser.add_argument("names", nargs="*", metavar="NAME", help="only cases whose name has one of these in it")
    parser.add_argument("--target", type=int, choices=TARGETS, action="append", help="only these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there as well")
    chosen = parser.parse_args(arguments)
    os.environ.pop("TRITON_INTERPRET", None)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.setdefault("TRITON_CACHE_DIR", scratch)
        cases = [case for case in all_cases() if not chosen.names or any(name in case.name for name in chosen.names)]
        pairs = [(c, target) for c in cases for target in chosen.target or TARGETS if target in c.targets]
        results = [(case, compile_case(case, target)) for case, target in pairs]
    print(table(result for _, result in results))
    for case in cases:
        if case.spill_limit:
            print(f"{case.name}: up to {case.spill_limit} bytes of spills accepted: {case.reason}")
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(result) for _, result in results], indent=1))
    wrong = [problem for case, result in results if (problem := excess(case, result))]
    print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
    return 1 if wrong or not results else 0


def _specialised(case: CompileCase) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], Any]]:
    """The signature, constants and attributes that a launch with such arguments would make."""
    names = list(case.kernel.arg_names)
    given = [*case.signature, *case.constexprs]
    if sorted(given) != sorted(names):
        raise ValueError(f"{case.name}: the case names {sorted(given)}, the kernel takes {sorted(names)}")
    signature: dict[str, str] = {}
    constants: dict[str, Any] = dict(case.constexprs)
    attributes: dict[tuple[int, ...], Any] = {}
    for index, name in enumerate(names):
        kind, _, hint = case.signature.get(name, "constexpr").partition(":")
        if hint == "1":
            kind, constants[name] = "constexpr", 1
        elif hint == "16" or (kind.startswith("*") and not hint):
            attributes[(index,)] = [["tt.divisibility", 16]]
        signature[name] = kind
    return signature, constants, attributes


def _widest_load(ptx: str) -> int:
    """In bytes, out of plain loads, vectors of them, and copies past the registers."""
    plain = [int(count or 1) * int(bits) // 8 for count, bits in LOADS.findall(ptx)]
    copies = [int(size, 0) for size in COPIES.findall(ptx)]
    return max([*plain, *copies], default=0)


if __name__ == "__main__":
    from minivllm_kernels.triton.compilation import main as run  # the kernels' files import this module under its own name

    sys.exit(run())
