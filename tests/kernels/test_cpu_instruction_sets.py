"""Every instruction set and compiler gives the bits that this machine's own build gives.

``src/selftest.cpp`` prints digests of vectors, products and whole decoders; it is linked with each library. aarch64 is
cross-compiled and emulated. Builds stay in the kernel cache, so only the first run after a change of the sources takes long.
"""

import functools
import os
import platform
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cpu_models import WEIGHT_AND_CACHE_KINDS, build_module, driver_for, model_config, need_cpu_kernels, random_tokens

from minivllm_kernels.cpu.build import ISAS, SOURCES, build_library, missing_features
from minivllm_kernels.cpu.library import kernel_library, open_library

pytestmark = pytest.mark.slow

X86 = ("avx512bf16", "avx512vnni", "avx512", "avxvnni", "avx2", "scalar")
CROSS_COMPILER = "aarch64-linux-gnu-g++"
CROSS_ROOT = "/usr/aarch64-linux-gnu"
CROSS_CLANG = "clang++ --target=aarch64-linux-gnu"
FLAGS = ("-O1", "-std=c++20", "-pthread", "-ffp-contract=off", "-Wno-psabi")


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    """All libraries that the tests below will ask for, built side by side when they are not there yet."""
    need_cpu_kernels()
    wanted = [("native", "c++"), ("native", "clang++"), ("sdot", CROSS_COMPILER), ("neon", CROSS_COMPILER)]
    wanted += [("sdot", CROSS_CLANG)] if shutil.which(CROSS_COMPILER) else []
    if platform.machine() == "x86_64":
        wanted += [(isa, "c++") for isa in X86 if not missing_features(isa)] + [("avx2", "clang++")]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for isa, compiler in wanted:
            if shutil.which(compiler.split()[0]):
                pool.submit(build_library, isa, compiler=compiler)  # a failure shows in the test that needs it


def need_processor(isa: str) -> None:
    if platform.machine() != "x86_64":
        pytest.skip(f"{isa} needs an x86 processor")
    missing = missing_features(isa)
    if missing:
        pytest.skip(f"this processor lacks {', '.join(missing)}")


def need_compiler(command: str, package: str) -> None:
    if shutil.which(command) is None:
        pytest.skip(f"{command} is not installed (Debian: {package})")


@functools.cache
def digests(isa: str, compiler: str, directory: Path, *runner: str) -> tuple[str, dict[str, str]]:
    """What the library calls itself, and the digests under their names."""
    library = build_library(isa, compiler=compiler)
    program = directory / f"selftest-{isa}-{compiler.replace(' ', '')}"
    command = [*compiler.split(), *FLAGS, *ISAS[isa].flags, str(SOURCES / "selftest.cpp"), str(library)]
    subprocess.run([*command, f"-Wl,-rpath,{library.parent}", "-o", str(program)], check=True, timeout=300)
    return printed_by(*runner, str(program))


def printed_by(*command: str) -> tuple[str, dict[str, str]]:
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (run.returncode, run.stderr) == (0, "")
    first, *lines = run.stdout.splitlines()
    return first.removeprefix("isa "), {line[:-17]: line[-16:] for line in lines}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("selftest")


@pytest.fixture(scope="module")
def native(directory: Path) -> dict[str, str]:
    return digests("native", "c++", directory)[1]


def test_the_selftest_looks_at_everything(native: dict[str, str], directory: Path) -> None:
    assert digests("native", "c++", directory)[0] == kernel_library().minivllm_isa().decode()
    assert {name.split()[0] for name in native} == {"exp2v", "silu", "lanes", "bytes", "bfloat16", "sample", "product", "decoder"}
    for weights, cache in WEIGHT_AND_CACHE_KINDS:
        for head_dim in (48, 64):
            assert f"decoder {weights} weights, {cache} cache, blocks of 16, heads of {head_dim}" in native
    # Different computations, different digests; only a block size changes nothing.
    for cache in ("float32", "bfloat16"):
        of_blocks = {native[f"decoder int8 weights, {cache} cache, blocks of {size}, heads of 48"] for size in (16, 24)}
        assert len(of_blocks) == 1
    assert len(set(native.values())) == len(native) - 2


@pytest.mark.parametrize("isa", X86)
def test_x86(isa: str, native: dict[str, str], directory: Path) -> None:
    need_processor(isa)
    assert digests(isa, "c++", directory) == (isa, native)


@pytest.mark.parametrize(("isa", "compiler"), [("sdot", CROSS_COMPILER), ("neon", CROSS_COMPILER), ("sdot", CROSS_CLANG)])
def test_aarch64(isa: str, compiler: str, native: dict[str, str], directory: Path) -> None:
    need_compiler(CROSS_COMPILER, "g++-aarch64-linux-gnu")  # clang links with its libraries
    need_compiler(compiler.split()[0], "clang")
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("qemu-aarch64 is not installed (Debian: qemu-user-static)")
    assert digests(isa, compiler, directory, emulator, "-L", CROSS_ROOT) == (isa, native)


@pytest.mark.parametrize("isa", ["native", "avx2"])
def test_clang(isa: str, native: dict[str, str], directory: Path) -> None:
    need_compiler("clang++", "clang")
    if isa != "native":
        need_processor(isa)
    assert digests(isa, "clang++", directory)[1] == native


@pytest.mark.parametrize("sanitizers", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizers: str, native: dict[str, str], directory: Path) -> None:
    """No read or write out of bounds, nothing undefined, no race; and the same bits even so."""
    need_compiler("c++", "g++")
    program = directory / sanitizers
    sources = [str(SOURCES / name) for name in ("selftest.cpp", "decoder.cpp")]
    flags = ["-O1" if sanitizers == "thread" else "-O0", *FLAGS[1:], *ISAS["native"].flags, f"-fsanitize={sanitizers}"]
    built = subprocess.run(
        ["c++", *flags, *sources, "-o", str(program)], capture_output=True, text=True, timeout=300, check=False
    )
    if "cannot find" in built.stderr:
        pytest.skip(f"the libraries of -fsanitize={sanitizers} are not installed")
    assert built.returncode == 0, built.stderr
    assert printed_by(str(program))[1] == native


@pytest.mark.parametrize("isa", X86)
def test_python_on_each_library(isa: str) -> None:
    """Through ctypes as the engine does it; in one process, each library with its own pool."""
    need_processor(isa)
    library = open_library(build_library(isa))
    assert library.minivllm_isa() == isa.encode()
    module = build_module(model_config("Qwen3", num_attention_heads=4, num_key_value_heads=1, head_dim=96))
    tokens = random_tokens(140, module.config)
    for weights, cache in WEIGHT_AND_CACHE_KINDS:
        expected = driver_for(module, weights, cache_kind=cache).run(tokens)
        got = driver_for(module, weights, cache_kind=cache, library=library).run(tokens, [100, 1, 39])
        assert torch.equal(got, expected)
