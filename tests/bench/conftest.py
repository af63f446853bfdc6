"""A model directory with a shape and no weights: small enough for seconds, with a vocabulary that the workload fits in."""

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from minivllm_plugin import LLM

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 10_240,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Its path; load it with ``load_format="dummy"``."""
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(SHAPE))
    return str(directory)


@pytest.fixture(scope="session")
def tiny_llm(tiny_model: str) -> Iterator[LLM]:
    with LLM(tiny_model, load_format="dummy") as llm:
        yield llm


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """A script of ``benchmarks/`` as a module. They import their neighbours as they do when they are run."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield import_module
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]
