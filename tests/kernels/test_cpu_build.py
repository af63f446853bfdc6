"""Building the CPU kernels: once, on first use, by whatever compiler there is, and never a crash when there is none."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cpu_models import need_cpu_kernels

from minivllm_kernels.cpu import build, library, ops
from minivllm_kernels.cpu.build import build_library, kernel_cache_directory
from minivllm_kernels.dispatch import KernelUnavailableError, choose, why_not

FakeCompiler = Callable[..., Path]


@pytest.fixture(autouse=True)
def _fresh(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache, and nothing remembered from or for other tests."""
    for name in ("CXX", "MINIVLLM_CPU_ISA", "MINIVLLM_KERNELS"):
        monkeypatch.delenv(name, raising=False)
    for cached in (library.kernel_library, ops.unavailable, choose):
        cached.cache_clear()
    yield
    for cached in (library.kernel_library, ops.unavailable, choose):
        cached.cache_clear()


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeCompiler:
    """Makes a command that does what it is told, and is then the only compiler there is."""

    def make(body: str = "", *, name: str = "fake-c++") -> Path:
        directory = tmp_path / "compilers"
        directory.mkdir(exist_ok=True)
        path = directory / name
        # The last argument is the output file; every run leaves a line.
        path.write_text(f'#!/bin/sh\nfor out; do :; done\necho "$*" >> "{tmp_path}/runs"\n{body}\necho "library" > "$out"\n')
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return path

    return make


@pytest.fixture
def num_runs(tmp_path: Path) -> Callable[[], int]:
    return lambda: len((tmp_path / "runs").read_text().splitlines()) if (tmp_path / "runs").exists() else 0


def left_in_the_cache() -> list[str]:
    directory = kernel_cache_directory()
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def test_a_hit_does_not_run_the_compiler(compiler: FakeCompiler, num_runs: Callable[[], int], empty_cache: Path) -> None:
    compiler()
    path = build_library()
    assert path.parent == empty_cache / "kernels"
    assert path.read_text() == "library\n"
    assert build_library() == path
    assert num_runs() == 1
    assert left_in_the_cache() == [path.name]


def test_whatever_changes_the_result_builds_again(
    compiler: FakeCompiler, num_runs: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = tmp_path / "src"
    shutil.copytree(build.SOURCES, sources)
    monkeypatch.setattr(build, "SOURCES", sources)
    command = compiler()
    paths = [build_library()]
    with (sources / "vec.h").open("a") as file:
        file.write("// changed\n")
    paths.append(build_library())
    with (sources / "decoder.cpp").open("a") as file:
        file.write("// changed\n")
    paths += [
        build_library(),
        build_library("scalar"),
        build_library(extra_flags=("-g",)),
        build_library(compiler=f"{command} -v"),
    ]
    os.utime(command, (1, 1))  # the compiler was replaced
    paths.append(build_library())
    monkeypatch.setattr(build, "_processor", lambda: "another machine, same home")
    paths.append(build_library())
    assert len(set(paths)) == len(paths) == num_runs()
    (sources / "selftest.cpp").write_text("// is no part of the library\n")
    (sources / "editor.swp").mkdir()
    assert build_library() == paths[-1]


def test_the_compiler_may_come_with_arguments(compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = compiler()
    monkeypatch.setenv("CXX", f"{command} --wrapped g++")
    build_library()
    assert (tmp_path / "runs").read_text().startswith("--wrapped g++ -O3 ")


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(KernelUnavailableError, match=r"no C\+\+ compiler \(no-such-compiler\) was found; install"):
        build_library()
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelUnavailableError, match=r"\(c\+\+, g\+\+, clang\+\+\)"):
        build_library()
    assert str(ops.unavailable()).startswith("no C++ compiler")
    assert str(why_not("cpu", "cpu")).startswith("no C++ compiler")
    assert choose("argmax", "cpu").backend == "reference"
    assert left_in_the_cache() == []


def test_a_failing_build_says_its_first_error_and_leaves_nothing(compiler: FakeCompiler) -> None:
    compiler('echo "note: \\303 this" >&2; echo "vec.h:3: error: no such thing" >&2; echo "x: error: more" >&2; exit 1')
    with pytest.raises(
        KernelUnavailableError, match=r"fake-c\+\+ could not build the CPU kernels: vec\.h:3: error: no such thing$"
    ):
        build_library()
    assert left_in_the_cache() == []


def test_a_build_that_fails_is_not_tried_again_and_again(compiler: FakeCompiler, num_runs: Callable[[], int]) -> None:
    compiler("exit 1")
    assert [ops.unavailable(), why_not("cpu", "cpu")].count(None) == 0
    assert choose("argmax", "cpu").backend == "reference"
    assert num_runs() == 1


def test_a_compiler_that_never_ends(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "BUILD_SECONDS", 0.2)
    compiler("exec sleep 60")
    with pytest.raises(KernelUnavailableError, match=r"timed out after 0\.2 seconds"):
        build_library()
    assert left_in_the_cache() == []


def test_a_compiler_that_dies_without_a_word(compiler: FakeCompiler) -> None:
    compiler("kill -9 $$")
    with pytest.raises(KernelUnavailableError, match="could not build"):
        build_library()
    assert left_in_the_cache() == []


def test_nowhere_to_write(compiler: FakeCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler()
    occupied = tmp_path / "occupied"
    occupied.write_text("")
    for place in (occupied, occupied / "below", Path("/proc/minivllm")):
        monkeypatch.setenv("MINIVLLM_CACHE", str(place))
        with pytest.raises(KernelUnavailableError, match=f"could not be built in {place}/kernels"):
            build_library()


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="permissions do not bind root")
def test_a_read_only_cache(compiler: FakeCompiler, empty_cache: Path) -> None:
    compiler()
    (empty_cache / "kernels").mkdir(parents=True)
    (empty_cache / "kernels").chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(KernelUnavailableError, match="Permission denied"):
        build_library()
    (empty_cache / "kernels").chmod(0)
    with pytest.raises(KernelUnavailableError, match="Permission denied"):
        build_library()


def test_a_forbidden_cache(compiler: FakeCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """As above, for root too: what the system says at every call."""

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    compiler()
    for method in ("mkdir", "exists"):
        with monkeypatch.context() as patch:
            patch.setattr(Path, method, refuse)
            with pytest.raises(KernelUnavailableError, match=r"could not be built in .*Permission denied"):
                build_library()


def test_an_unknown_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_CPU_ISA", "avx9000")
    with pytest.raises(KernelUnavailableError, match=r"MINIVLLM_CPU_ISA='avx9000' is unknown; known are native, .*scalar"):
        build_library()
    assert "avx9000" in str(ops.unavailable())


def test_an_instruction_set_that_the_processor_lacks(
    compiler: FakeCompiler, num_runs: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running it would end the process with an illegal instruction."""
    compiler()
    monkeypatch.setenv("MINIVLLM_CPU_ISA", "avx512vnni")
    monkeypatch.setattr(build, "_processor", lambda: "flags\t\t: fpu avx2 fma bmi1 bmi2 f16c movbe abm\nmodel name : old")
    assert ops.unavailable() == (
        "MINIVLLM_CPU_ISA='avx512vnni' needs avx512f, avx512bw, avx512cd, avx512dq, avx512vl, avx512_vnni, "
        "which this processor lacks"
    )
    assert num_runs() == 0
    assert build.missing_features("avx2") == []
    monkeypatch.setattr(build, "_processor", lambda: "arm64 of a system that does not say")
    assert build.missing_features("avx512vnni") == []


def test_plain_c_is_not_used_unless_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Plain:
        @staticmethod
        def minivllm_isa() -> bytes:
            return b"scalar"

    monkeypatch.setattr(ops, "kernel_library", Plain)
    assert "neither AVX2 nor NEON" in str(ops.unavailable())
    ops.unavailable.cache_clear()
    monkeypatch.setenv("MINIVLLM_CPU_ISA", "scalar")
    assert ops.unavailable() is None


def test_a_damaged_library_names_itself(compiler: FakeCompiler) -> None:
    compiler()  # what it "builds" is no library
    reason = str(ops.unavailable())
    assert "do not load" in reason
    assert str(build_library()) in reason
    assert "delete the file to have it built again" in reason


def test_structures_that_disagree_are_refused(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MINIVLLM_CACHE")
    need_cpu_kernels()
    library.kernel_library.cache_clear()
    monkeypatch.setattr(library, "STRUCTURES", (library.Cache, *library.STRUCTURES[1:]))
    with pytest.raises(KernelUnavailableError, match="Cache has 32 bytes here and 40"):
        library.kernel_library()


BUILD = "from minivllm_kernels.cpu.build import build_library; print(build_library())"


def test_two_processes_at_once(compiler: FakeCompiler, num_runs: Callable[[], int]) -> None:
    """Neither waits for the other, neither sees half a file, one file remains."""
    compiler("sleep 1")
    both = [subprocess.Popen([sys.executable, "-c", BUILD], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {process.communicate(timeout=60)[0].strip() for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert num_runs() == 2
    [path] = paths
    assert Path(path).read_text() == "library\n"
    assert left_in_the_cache() == [Path(path).name]


IMPORTS = """
import minivllm_plugin, minivllm_kernels
import minivllm_kernels.cpu.build, minivllm_kernels.cpu.library, minivllm_kernels.cpu.packing
import minivllm_kernels.cpu.decoder, minivllm_kernels.cpu.ops
import minivllm_plugin.runner.backends, minivllm_plugin.runner.cpu_runner, minivllm_plugin.runner.cpu_weights
from minivllm_plugin import LLM, SamplingParams
"""


def test_imports_build_nothing(compiler: FakeCompiler, num_runs: Callable[[], int], empty_cache: Path) -> None:
    compiler()
    done = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert num_runs() == 0
    assert not empty_cache.exists()
