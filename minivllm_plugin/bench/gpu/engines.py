"""Engines to be checked and measured: the model's shape with random weights, and a tiny one for generations and rehearsals."""

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from minivllm_plugin.bench.gpu.records import Given, Recorder
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.models.architectures import llama3_2, qwen3
from minivllm_plugin.runner.model_runner import ModelRunner
from minivllm_plugin.runner.step_counts import PROMPT
from minivllm_plugin.serving.llm import LLM
from minivllm_plugin.serving.loading import Loaded, load

__all__ = ["MODEL", "driven", "model_runner", "model_to_measure", "opened", "record_launches", "tiny_model"]

MODEL = "qwen3-0.6b"
SMALL = {"vocab_size": 1000, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2}
TINY: dict[str, dict[str, Any]] = {
    "llama": {**llama3_2(192, 256, 2, 6, 2), **SMALL, "head_dim": 32, "rope_scaling": None},
    "qwen3": {**qwen3(128, 192, 2, 4, 2), **SMALL, "head_dim": 48},
}


@contextmanager
def tiny_model(family: str) -> Iterator[str]:
    """A directory with the configuration of a two-layer ``llama`` or ``qwen3``, for ``load_format="dummy"``."""
    with TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(TINY[family]), encoding="utf-8")
        yield directory


@contextmanager
def model_to_measure(given: Given) -> Iterator[str]:
    """Qwen3-0.6B's shape, or in a rehearsal a tiny one."""
    if given.rehearse:
        with tiny_model("qwen3") as directory:
            yield directory
    else:
        yield MODEL


@contextmanager
def opened(model: str, given: Given, **options: Any) -> Iterator[tuple[LLM, ModelRunner]]:
    """An LLM with dummy weights on the device, and the runner in it; all of its memory is given back."""
    runners: list[ModelRunner] = []

    def loader(config: EngineConfig) -> tuple[LLMEngine, Loaded]:
        engine, about = load(config)
        runners.append(model_runner(engine))
        return engine, about

    config = EngineConfig.from_options(model, {"load_format": "dummy", "device": given.device, **options})
    with LLM.from_loader(config, loader) as llm:
        yield llm, runners.pop()
    _clean()


@contextmanager
def driven(model: str, given: Given, **options: Any) -> Iterator[LLMEngine]:
    """An engine with dummy weights that is stepped by hand, on this thread."""
    config = EngineConfig.from_options(model, {"load_format": "dummy", "device": given.device, **options})
    engine = load(config)[0]
    yield engine
    del engine
    _clean()


def model_runner(engine: LLMEngine) -> ModelRunner:
    """What computes there.

    Raises:
        TypeError: not torch, with kernels of ours: nothing to be checked here.
    """
    if not isinstance(engine.runner, ModelRunner):
        raise TypeError(f"{type(engine.runner).__name__} computes, not a ModelRunner; set MINIVLLM_KERNELS=reference on a CPU")
    return engine.runner


def record_launches(runner: ModelRunner, name: str, given: Given, record: Recorder, *, graphs: bool) -> None:
    """Check that steps were replayed where they should be, and that none was computed in a slower way than it had to be."""
    if given.rehearse:
        return
    counts = runner.counts
    unexpected = {reason: count for reason, count in counts.eager_steps.items() if reason != PROMPT}
    if graphs:
        told = f"{counts.graph_replays} replayed, {counts.graph_captures} captured, eager: {counts.eager_steps}"
        record.check(f"{name}: decode steps are replayed", counts.graph_replays > 0 and not unexpected, told)
    else:
        record.check(f"{name}: nothing is replayed", counts.graph_replays == 0, f"eager: {counts.eager_steps}")


def _clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
