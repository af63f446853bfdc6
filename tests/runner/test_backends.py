"""Which runner and which types a setting leads to; what is said when the compiled kernels cannot be used."""

import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_models import (
    DEFAULTS,
    build_module,
    model_config,
    need_cpu_kernels,
    random_tokens,
    use_private_cache,
    write_checkpoint,
)

from minivllm_kernels.cpu import build, library, ops
from minivllm_kernels.dispatch import choose
from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.models.catalog import ModelSource
from minivllm_plugin.models.loader import describe_model
from minivllm_plugin.runner.backends import Backend, build_backend
from minivllm_plugin.runner.cpu_runner import CpuRunner
from minivllm_plugin.runner.kv_cache import block_bytes
from minivllm_plugin.runner.model_runner import ModelRunner

SPECIAL = ("CXX", "MINIVLLM_CPU_ISA", "MINIVLLM_KERNELS")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backends are chosen anew; what a test forgets or forces does not last."""
    cached = (library.kernel_library, ops.unavailable, choose)
    for name in SPECIAL:
        monkeypatch.delenv(name, raising=False)
    for function in cached:
        function.cache_clear()
    yield
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()


def architecture(**fields: Any) -> ModelSource:
    return ModelSource.from_architecture({**DEFAULTS, "architectures": ["LlamaForCausalLM"], **fields})


def backend_of(source: ModelSource | None = None, **options: Any) -> Backend:
    source = source or architecture()
    config = EngineConfig(model="tiny", load_format="dummy", **{"num_blocks": 8, **options})
    return build_backend(config, source, describe_model(source, load_format="dummy"), "cpu", ())


# dtype, quantization, kv_cache_dtype, the checkpoint's dtype -> kernels, weights, cache
TABLE = [
    ("auto", "auto", "auto", "float32", "cpu", "int8", "bfloat16"),
    ("auto", "auto", "auto", "bfloat16", "cpu", "int8", "bfloat16"),
    ("auto", "auto", "auto", "float16", "cpu", "int8", "bfloat16"),
    ("auto", "auto", "float32", "float32", "cpu", "int8", "float32"),
    ("auto", "auto", "int8", "float32", "cpu", "int8", "int8"),
    ("auto", "int8", "auto", "float32", "cpu", "int8", "bfloat16"),
    ("auto", "int4", "auto", "float32", "cpu", "int4", "bfloat16"),
    ("auto", "int4", "int8", "bfloat16", "cpu", "int4", "int8"),
    ("auto", "none", "auto", "float32", "cpu", "float32", "float32"),
    ("auto", "none", "auto", "float16", "cpu", "float32", "float32"),
    ("auto", "none", "auto", "bfloat16", "cpu", "bfloat16", "float32"),  # exact: its own values, computed in float32
    ("float32", "auto", "auto", "float32", "cpu", "float32", "float32"),
    ("float32", "auto", "auto", "bfloat16", "cpu", "bfloat16", "float32"),
    ("float32", "none", "bfloat16", "float32", "cpu", "float32", "bfloat16"),
    ("float32", "int8", "auto", "float32", "cpu", "int8", "float32"),
    ("float32", "auto", "int8", "float32", "cpu", "float32", "int8"),
    ("bfloat16", "auto", "auto", "float32", "cpu", "bfloat16", "bfloat16"),
    ("bfloat16", "int8", "auto", "bfloat16", "cpu", "int8", "bfloat16"),
    ("bfloat16", "none", "float32", "bfloat16", "cpu", "bfloat16", "float32"),
    ("float16", "auto", "auto", "float16", "torch", "float16", "float16"),
    ("float16", "none", "auto", "float32", "torch", "float16", "float16"),
    ("float16", "auto", "float32", "float32", "torch", "float16", "float32"),
    ("float16", "auto", "bfloat16", "float32", "torch", "float16", "bfloat16"),
    ("float32", "auto", "float16", "float32", "torch", "float32", "float16"),
    ("bfloat16", "auto", "fp8_e4m3", "float32", "torch", "bfloat16", "float8_e4m3fn"),
    ("float32", "none", "fp8", "float32", "torch", "float32", "float8_e4m3fn"),
    ("float16", "none", "fp8_e5m2", "float32", "torch", "float16", "float8_e5m2"),
]


def cache_kind(backend: Backend) -> str:
    runner = backend.runner
    if isinstance(runner, CpuRunner):
        return str(runner._decoder.pool.layers[0][0].dtype).removeprefix("torch.")
    assert isinstance(runner, ModelRunner)
    assert runner._cache is not None
    [dtype] = {tensor.dtype for pair in runner._cache.layers for tensor in pair}
    assert backend.cache_bytes == block_bytes(runner.model.config, 16, runner.cache_kind) * backend.num_blocks
    return str(dtype).removeprefix("torch.")


@pytest.mark.parametrize("row", TABLE, ids=lambda row: "-".join(row[:4]))
def test_settings_to_types(row: tuple[str, ...]) -> None:
    need_cpu_kernels()
    dtype, quantization, kv_cache_dtype, stored, *expected = row
    backend = backend_of(architecture(torch_dtype=stored), dtype=dtype, quantization=quantization, kv_cache_dtype=kv_cache_dtype)
    assert [backend.kernels, backend.dtype, cache_kind(backend)] == expected
    assert backend.num_blocks == 8


def test_the_pool_counts_its_bytes() -> None:
    need_cpu_kernels()
    slots = 8 * 16 * DEFAULTS["num_key_value_heads"] * DEFAULTS["num_hidden_layers"] * 2
    size = DEFAULTS["head_dim"]
    for kind, each in (("float32", 4 * size), ("bfloat16", 2 * size), ("int8", size + 4)):
        assert backend_of(kv_cache_dtype=kind).cache_bytes == slots * each


@pytest.mark.parametrize("option", ["quantization", "kv_cache_dtype"])
@pytest.mark.parametrize(
    ("source", "settings", "reason"),
    [
        ({}, {"dtype": "float16"}, "dtype='float16' is not among their types"),
        ({"hidden_size": 48}, {}, "hidden_size=48 is not a multiple of 32"),
        ({"head_dim": 24}, {}, "head_dim=24 is not a multiple of 16"),
    ],
)
def test_int8_that_cannot_be_had_is_refused(option: str, source: dict[str, Any], settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"{option}='int8' needs the compiled CPU kernels.*{reason}.*leave it at 'auto'"):
        backend_of(architecture(**source), **settings, **{option: "int8"})


def test_int4_that_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_KERNELS", "reference")
    with pytest.raises(ConfigError, match=r"quantization='int4' needs the compiled CPU kernels.*MINIVLLM_KERNELS"):
        backend_of(quantization="int4")


def test_an_int8_cache_needs_whole_groups() -> None:
    need_cpu_kernels()
    with pytest.raises(ConfigError, match=r"kv_cache_dtype='int8'.*multiple of 16, got 8"):
        backend_of(kv_cache_dtype="int8", block_size=8)


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_no_compiler_means_torch_with_one_line(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    backend = backend_of()
    assert (backend.kernels, backend.dtype) == ("torch", "float32")
    [line] = warnings_of(caplog)
    assert line.startswith("the CPU kernels are not used: no C++ compiler (no-such-compiler) was found")
    assert "plain torch computes instead" in line
    for option in ("quantization", "kv_cache_dtype"):
        with pytest.raises(ConfigError, match=rf"{option}='int8'.*no C\+\+ compiler"):
            backend_of(None, **{option: "int8"})


@pytest.mark.parametrize("cause", ["no compiler", "failing build", "unknown instruction set", "nowhere to write"])
def test_whatever_is_wrong_the_engine_answers(
    cause: str, empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A whole LLM, one warning, the reason in it, and tokens."""
    if cause == "no compiler":
        monkeypatch.setenv("CXX", "no-such-compiler")
    elif cause == "failing build":
        monkeypatch.setattr(build, "MAIN", "no-such-file.cpp")
        need_a_compiler()
        (tmp_path / "src").mkdir()
        (tmp_path / "src" / "no-such-file.cpp").write_text("#error on purpose\n")
        monkeypatch.setattr(build, "SOURCES", tmp_path / "src")
    elif cause == "unknown instruction set":
        monkeypatch.setenv("MINIVLLM_CPU_ISA", "avx9000")
    else:
        need_a_compiler()
        (tmp_path / "occupied").write_text("")
        monkeypatch.setenv("MINIVLLM_CACHE", str(tmp_path / "occupied"))
    with LLM("smollm2-135m", load_format="dummy", num_blocks=8, max_model_len=64) as llm:
        output = llm.generate([1, 2, 3], SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), use_tqdm=False)
    assert len(output[0].outputs[0].token_ids) == 2
    [line] = warnings_of(caplog)
    reason = {
        "no compiler": "no C++ compiler",
        "failing build": "on purpose",
        "unknown instruction set": "'avx9000' is unknown",
        "nowhere to write": "could not be built in",
    }[cause]
    assert reason in line


def need_a_compiler() -> None:
    if not any(map(shutil.which, build.COMPILERS)):
        pytest.skip("needs a C++ compiler")


def test_the_reference_can_be_forced_and_builds_nothing(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    marker = tmp_path / "was-run"
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\ntouch {marker}\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("MINIVLLM_KERNELS", "reference")
    with LLM("smollm2-135m", load_format="dummy", num_blocks=8, max_model_len=64) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=1), use_tqdm=False)
    assert not marker.exists()
    [line] = warnings_of(caplog)
    assert "MINIVLLM_KERNELS" in line
    with pytest.raises(ConfigError, match="MINIVLLM_KERNELS"):
        backend_of(quantization="int8")


def test_threads_are_torchs_unless_they_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    need_cpu_kernels()
    asked: list[int] = []
    from minivllm_kernels.cpu import decoder

    class Recorder(decoder.CpuDecoder):
        def __init__(self, *args: Any, threads: int, **options: Any) -> None:
            asked.append(threads)
            super().__init__(*args, threads=threads, **options)

    monkeypatch.setattr(decoder, "CpuDecoder", Recorder)
    backend_of()
    backend_of(num_threads=3)
    assert asked == [torch.get_num_threads(), 3]


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16], ids=str)
def test_both_paths_give_the_same_tokens_in_float32(stored: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same checkpoint, the same prompts: compiled and torch agree on every greedy token."""
    need_cpu_kernels()
    use_private_cache(tmp_path / "cache", monkeypatch)
    directory = write_checkpoint(build_module(model_config("Qwen3")), tmp_path / "model", dtype=stored)
    prompts = [random_tokens(length, model_config(), seed=length) for length in (1, 3, 40, 90)]
    answers = []
    for forced in ("cpu,reference", "reference"):
        monkeypatch.setenv("MINIVLLM_KERNELS", forced)
        choose.cache_clear()
        with LLM(str(directory), dtype="float32", num_blocks=64, max_model_len=128) as llm:
            params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers[0]}) == 4


def test_a_description_in_another_dtype_changes_no_file() -> None:
    """bfloat16 weights of a float32 checkpoint are rounded once, when they are packed."""
    need_cpu_kernels()
    source = architecture()
    description = describe_model(source, load_format="dummy")
    config = EngineConfig(model="tiny", load_format="dummy", num_blocks=8, dtype="bfloat16")
    stored = replace(description, config=replace(description.config, dtype="bfloat16"))
    backends = [build_backend(config, source, each, "cpu", ()) for each in (description, stored)]
    weights = [backend.runner._decoder._kept[0] for backend in backends]  # type: ignore[attr-defined]
    assert torch.equal(weights[0].embedding.data, weights[1].embedding.data)
