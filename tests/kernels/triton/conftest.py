"""The kernels run in Triton's interpreter, in this process: tests/conftest.py has set TRITON_INTERPRET before triton's import.

What needs the real compiler runs in a process of its own (``compiler_environment``).
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="the GPU kernels need triton (in the developers' packages on Linux)")

import triton.language as tl

from minivllm_kernels import dispatch
from minivllm_kernels.triton import interpreted

if (reason := interpreted.unavailable()) is not None:
    raise pytest.UsageError(f"these tests cannot run in this process: {reason}")


@pytest.fixture(autouse=True)
def _seeded_on_one_thread() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the tensors are tiny
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _bfloat16_rounds_as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter cuts bits off where a GPU, and torch, round to nearest even: results would be off by a last place
    a step, and a comparison that allows for it would miss a rounding left out.
    """
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    cast = InterpreterBuilder.cast_impl

    def cast_rounded(builder: InterpreterBuilder, source: TensorHandle, target: Any) -> TensorHandle:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cast(builder, source, target)
        rounded = torch.from_numpy(np.ascontiguousarray(source.data)).reshape(source.data.shape).to(torch.bfloat16)
        return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_rounded)


@pytest.fixture
def forced_interpreter(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The public ops go to the interpreted kernels, and to the reference where there is none."""
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "interpreter,reference")
    dispatch.choose.cache_clear()
    yield
    dispatch.choose.cache_clear()


@pytest.fixture
def compiler_environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that compiles kernels, with an empty cache of its own."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "COV_"))}
    return environment | {"TRITON_CACHE_DIR": str(tmp_path / "triton"), "CUDA_VISIBLE_DEVICES": ""}
