"""When the Triton kernels are picked, and what is said when they cannot be (trials J06)."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import minivllm_kernels as kernels
from minivllm_kernels import dispatch
from minivllm_kernels.dispatch import ENVIRONMENT_VARIABLE, KernelUnavailableError, explain, implementation
from minivllm_kernels.metadata import AttentionGeometry
from minivllm_kernels.triton import interpreted, ops
from minivllm_kernels.triton.norm_rotary_store import norm_rotary_store


@pytest.fixture(autouse=True)
def _fresh_choices(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(ENVIRONMENT_VARIABLE, raising=False)
    dispatch.choose.cache_clear()
    yield
    dispatch.choose.cache_clear()


def run(code: str, **environment: str) -> str:
    """What a fresh process prints, with triton's compiler and without a GPU."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "COV_"))}
    command = [sys.executable, "-c", code]
    environment = inherited | {"CUDA_VISIBLE_DEVICES": ""} | environment
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_op_of_the_backend_is_a_public_op() -> None:
    assert set(kernels.OPS) >= THEIR_OPS
    assert all(callable(getattr(ops, name)) for name in ops.__all__)


THEIR_OPS = set(ops.__all__) - {"unavailable", "unsupported"}
WAITS = {"item", "cpu", "tolist", "numpy", "nonzero", "synchronize"}


def test_no_wrapper_waits_for_the_device() -> None:
    """A value read back in a wrapper would stop the host in every layer, and cannot stand in a captured graph."""
    found = [
        f"{path.name}:{node.lineno} .{node.func.attr}()"
        for path in sorted(Path(ops.__file__).parent.glob("*.py"))
        if path.name != "autotune.py"  # measures, never during capture
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in WAITS
    ]
    assert found == []


def test_nothing_but_force_brings_in_the_interpreter() -> None:
    assert "interpreter" not in {choice.backend for device in ("cpu", "cuda") for choice in explain(device)}


def test_forced_the_interpreter_runs_what_there_are_kernels_for(forced_interpreter: None) -> None:
    chosen = {choice.op: choice.backend for choice in explain("cpu")}
    assert {op for op, backend in chosen.items() if backend == "interpreter"} == THEIR_OPS
    assert set(chosen.values()) == {"interpreter", "reference"}
    assert implementation("norm_rotary_store", "cpu") is norm_rotary_store


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_dim": 320}, "head size 320, more than 256"),
        ({"num_heads": 7}, "7 query heads, which 2 KV heads cannot share evenly"),
        ({"cache_dtype": torch.int8}, "a cache of torch.int8"),
    ],
)
def test_a_model_that_the_kernels_cannot_do_goes_to_the_reference_aloud(
    changes: dict[str, Any], reason: str | None, forced_interpreter: None
) -> None:
    shape = AttentionGeometry(8, 2, 128, 16, torch.bfloat16, torch.bfloat16)
    choices = {choice.op: choice for choice in dispatch.fitted(replace(shape, **changes)).explain("cpu")}
    for op in ("attention", "store_kv", "rotary", "norm_rotary_store"):
        if reason is None:
            assert choices[op].backend == "interpreter"
        else:
            assert choices[op].backend == "reference"
            assert reason in dict(choices[op].passed_over)["interpreter"]
    assert choices["rms_norm"].backend == choices["silu_and_mul"].backend == "interpreter"


def test_in_a_process_that_interprets_the_device_backend_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "TRITON_INTERPRET is set" in dict(dispatch.choose("rms_norm", "cuda").passed_over)["triton"]


def test_a_machine_on_which_no_kernel_can_be_launched_says_so_before_anything_is_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No C compiler, for instance. Here the launch is refused by a torch without CUDA, or a device that does not interpret."""

    def refused(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("Failed to find C compiler.")

    monkeypatch.setattr(ops, "interpreting", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", lambda *shape, **_: torch.full(shape, 1.0))
    outcomes = (
        (refused, "a first kernel does not run here (RuntimeError: Failed to find C compiler.)"),
        (torch.zeros_like, "a first kernel computes wrong numbers here"),
        (lambda x: torch.nn.functional.silu(x[:, :1]) * x[:, 1:], None),
    )
    for launch, reason in outcomes:
        ops._tried.cache_clear()
        monkeypatch.setattr(ops, "silu_and_mul", launch)
        assert ops.unavailable() == reason
    ops._tried.cache_clear()


def test_forced_on_a_cpu_the_triton_backend_is_an_error_that_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENVIRONMENT_VARIABLE, "triton")
    with pytest.raises(KernelUnavailableError, match=r"'rms_norm' on 'cpu' \(triton: serves only cuda\); unset MINIVLLM_KERNELS"):
        implementation("rms_norm", "cpu")


def test_without_a_gpu_a_compiling_process_says_what_is_missing() -> None:
    printed = run(
        """
from minivllm_kernels.dispatch import choose
print(dict(choose("rms_norm", "cuda").passed_over)["triton"])
from minivllm_kernels.metadata import AttentionGeometry
from minivllm_kernels.triton import interpreted
print(interpreted.unavailable())
"""
    )
    assert printed.splitlines() == [
        "no CUDA device is available to torch",
        "triton was imported without TRITON_INTERPRET=1; set it before the process starts",
    ]
    assert interpreted.unavailable() is None


def test_where_triton_does_not_import_the_reference_runs_on_the_device() -> None:
    printed = run(
        """
import sys
sys.modules["triton"] = None
from minivllm_kernels.dispatch import choose
choice = choose("rms_norm", "cuda")
print(choice.backend, dict(choice.passed_over)["triton"])
"""
    )
    assert printed.startswith("reference does not import (ModuleNotFoundError: ")


def test_a_cpu_path_does_not_import_triton() -> None:
    printed = run(
        """
import sys
import torch
import minivllm_kernels
minivllm_kernels.rms_norm(torch.ones(2, 8), torch.ones(8), 1e-6)
minivllm_kernels.explain("cpu")
print([name for name in sys.modules if name == "triton" or name.startswith("minivllm_kernels.triton")])
""",
        MINIVLLM_KERNELS="reference",
    )
    assert printed == "[]\n"
