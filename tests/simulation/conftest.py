"""A cost model whose times are exact in binary, small traces, and the recorded trace where there is one."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from minivllm_plugin.simulation import CostModel, Trace, TraceRequest, read_trace

VARIABLE = "MINIVLLM_TRACES"


@pytest.fixture
def cost() -> CostModel:
    """A second a step, half a second a prefill token, a quarter a decode: sums without rounding."""
    return CostModel(1.0, 0.5, 0.25)


@pytest.fixture
def requests() -> Callable[..., Trace]:
    """``requests((arrival, prompt, output), …)``: a trace of prompts that share nothing."""

    def make(*rows: tuple[float, int, int]) -> Trace:
        return Trace(tuple(TraceRequest(*row) for row in rows))

    return make


@pytest.fixture(scope="session")
def mooncake() -> Trace:
    """The Mooncake conversation trace: where MINIVLLM_TRACES says, else in ``shared/traces`` beside the repository."""
    folder = os.environ.get(VARIABLE)
    path = (Path(folder) if folder else Path(__file__).parents[3] / "shared" / "traces") / "conversation_trace.jsonl"
    if not path.is_file():
        pytest.skip(f"conversation_trace.jsonl of the Mooncake traces is not there; set {VARIABLE} to its directory")
    return read_trace(path)
