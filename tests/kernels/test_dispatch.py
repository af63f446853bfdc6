"""Choosing a backend: by order, by force, and with broken optional packages in the way (trials J06)."""

import dataclasses
import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import minivllm_kernels as kernels
from minivllm_kernels import dispatch
from minivllm_kernels.dispatch import ENVIRONMENT_VARIABLE, KernelUnavailableError, explain, implementation


@pytest.fixture(autouse=True)
def _fresh_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    dispatch.choose.cache_clear()
    yield
    dispatch.choose.cache_clear()


def backends(monkeypatch: pytest.MonkeyPatch, **modules: tuple[str, tuple[str, ...]]) -> None:
    """Put these before the reference."""
    monkeypatch.setattr(dispatch, "BACKENDS", {**modules, "reference": dispatch.BACKENDS["reference"]})


def test_every_op_has_a_function_and_an_implementation() -> None:
    assert [choice.op for choice in explain("cpu")] == list(kernels.OPS)
    for op in kernels.OPS:
        assert callable(getattr(kernels, op))
        assert op in kernels.__all__
        assert callable(implementation(op, "cpu"))


def test_every_device_can_fall_back_to_the_reference() -> None:
    for device in ("cpu", "cuda", "mps", "xpu"):
        assert {choice.backend for choice in explain(device)} <= set(dispatch.BACKENDS)


def test_the_first_backend_that_has_the_op_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = types.ModuleType("fast_backend")
    fast.linear = lambda *_: "fast"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fast_backend", fast)
    backends(monkeypatch, fast=("fast_backend", ("cpu",)))
    choices = {choice.op: choice for choice in explain("cpu")}
    assert choices["linear"].backend == "fast"
    assert choices["attention"].backend == "reference"
    assert choices["attention"].passed_over == (("fast", "does not have this op"),)
    assert {choice.backend for choice in explain("cuda")} == {"reference"}


@pytest.mark.parametrize("error", ["ImportError('no GPU here')", "RuntimeError('driver too old')", "OSError('libcuda.so')"])
def test_a_backend_that_fails_to_import_is_passed_over(error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_backend.py").write_text(f"raise {error}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    backends(monkeypatch, broken=("broken_backend", ("cpu",)))
    choice = dispatch.choose("linear", "cpu")
    assert choice.backend == "reference"
    [(name, reason)] = choice.passed_over
    assert name == "broken"
    assert error.partition("(")[0] in reason


def test_a_forced_backend_that_cannot_run_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    backends(monkeypatch, gpu=("no_such_module_anywhere", ("cuda",)))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "gpu")
    with pytest.raises(KernelUnavailableError, match=r"'linear' on 'cpu' \(gpu: serves only cuda\).*unset MINIVLLM_KERNELS"):
        implementation("linear", "cpu")
    with pytest.raises(KernelUnavailableError, match="no_such_module_anywhere"):
        implementation("linear", "cuda")


def test_an_unknown_name_is_an_error_that_lists_the_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "trition")
    with pytest.raises(KernelUnavailableError, match=r"trition: unknown backend, known are .*reference"):
        explain("cpu")


def test_force_is_an_ordered_list(monkeypatch: pytest.MonkeyPatch) -> None:
    backends(monkeypatch, gpu=("no_such_module_anywhere", ("cuda",)))
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, " gpu , reference,")
    choice = dispatch.choose("linear", "cpu")
    assert choice.backend == "reference"
    assert choice.passed_over == (("gpu", "serves only cuda"),)


def test_an_unknown_device_is_an_error() -> None:
    with pytest.raises(KernelUnavailableError, match=r"'npu'.*use a device among"):
        implementation("linear", "npu")


WITHOUT_GPU_PACKAGES = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("triton", "flash_attn"):
            raise {error}("refused: " + name)

sys.meta_path.insert(0, Refuse())
import torch
import minivllm_kernels
from minivllm_plugin.models.catalog import ModelSource
from minivllm_plugin.models.loader import load_model

architecture = dict(
    architectures=["LlamaForCausalLM"], vocab_size=50, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
    num_attention_heads=3, max_position_embeddings=32,
)
loaded = load_model(ModelSource.from_architecture(architecture), dtype={dtype!r}, load_format="dummy")
caches = [(torch.empty(2, 8, 3, 8, dtype=loaded.dtype), torch.empty(2, 8, 3, 8, dtype=loaded.dtype)) for _ in range(2)]
tokens = [1, 2, 3]
with torch.inference_mode():
    new = tokens
    for _ in range(5):
        start = len(tokens) - len(new)
        metadata = minivllm_kernels.AttentionMetadata.build([len(new)], [len(tokens)], [[1, 0]], 8)
        hidden = loaded.module(torch.tensor(new), torch.arange(start, len(tokens)), caches, metadata)
        new = minivllm_kernels.argmax(loaded.module.compute_logits(hidden[-1:])).tolist()
        tokens += new
print(len(tokens), all(choice.function for choice in minivllm_kernels.explain("cpu")))
"""


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_five_tokens_without_triton_flash_attention_or_gpu(error: str, dtype: str) -> None:
    code = WITHOUT_GPU_PACKAGES.format(error=error, dtype=dtype)
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert run.stderr == ""
    assert run.stdout.split() == ["8", "True"]


def test_a_fused_op_is_taken_only_from_a_backend_that_has_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who brings only a store_kv has a cache layout of their own: a fused op of somebody else would write past it."""
    whole = types.SimpleNamespace(norm_rotary_store=1, rms_norm=2, rotary=3, store_kv=4)
    backends(monkeypatch, whole=(whole, ("cpu",)))
    assert dispatch.choose("norm_rotary_store", "cpu").backend == "whole"
    dispatch.choose.cache_clear()
    own_layout = types.SimpleNamespace(store_kv=5)
    backends(monkeypatch, layout=(own_layout, ("cpu",)), whole=(whole, ("cpu",)))
    choice = dispatch.choose("norm_rotary_store", "cpu")
    assert choice.backend == "reference"
    assert dict(choice.passed_over)["whole"] == "store_kv is layout's"


GEOMETRY = kernels.AttentionGeometry(
    num_heads=4, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16, cache_dtype=torch.bfloat16
)


def test_what_cannot_do_a_model_is_passed_over_for_it_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def unsupported(op: str, geometry: kernels.AttentionGeometry) -> str | None:
        asked.append((op, geometry))
        return f"block_size {geometry.block_size} is odd to it" if geometry.block_size < 256 else None

    picky = types.SimpleNamespace(attention="picky", unsupported=unsupported)
    backends(monkeypatch, picky=(picky, ("cpu",)))
    assert dispatch.choose("attention", "cpu").backend == "picky"
    assert asked == []  # without a model there is nothing to ask
    by_op = {choice.op: choice for choice in explain("cpu", GEOMETRY)}
    assert by_op["attention"].backend == "reference"
    assert by_op["attention"].passed_over == (("picky", "block_size 16 is odd to it"),)
    assert asked == [("attention", GEOMETRY)]  # only for the op that it has
    large = dispatch.fitted(dataclasses.replace(GEOMETRY, block_size=256))
    assert large.choose("attention", "cpu").backend == "picky"
    with dispatch.using(large):
        assert implementation("attention", "cpu") == "picky"
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "picky")
    with pytest.raises(KernelUnavailableError, match=r"'attention' on 'cpu' \(picky: block_size 16 is odd to it\)"):
        dispatch.fitted(GEOMETRY).choose("attention", "cpu")


def test_a_table_of_an_engine_is_fitted_to_its_model_and_one_that_fails_to_say_is_passed_over() -> None:
    broken = types.SimpleNamespace(attention="broken", unsupported=lambda op, geometry: 1 / 0)
    table = dispatch.BackendTable({"broken": (broken, ("cpu",)), **dispatch.builtin_backends()})
    assert table.choose("attention", "cpu").backend == "broken"
    choice = dispatch.fitted(GEOMETRY, table).choose("attention", "cpu")
    assert choice.backend == "reference"
    assert choice.passed_over[0] == ("broken", "its unsupported() failed (ZeroDivisionError: division by zero)")
    assert dispatch.fitted(GEOMETRY, table).geometry == GEOMETRY


def test_rows_are_sampled_in_one_pass_only_by_whom_both_kinds_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = types.SimpleNamespace(sample_rows=1, argmax=2, sample=3)
    backends(monkeypatch, mine=(types.SimpleNamespace(sample=4), ("cpu",)), whole=(whole, ("cpu",)))
    choice = dispatch.choose("sample_rows", "cpu")
    assert choice.backend == "reference"
    assert dict(choice.passed_over)["whole"] == "sample is mine's"
