"""A model through the interpreted kernels gives the reference's greedy tokens: one prompt, decode steps, a batch of two."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import SHAPES, Driver, load_directory, reference_model

from minivllm_kernels import argmax, dispatch
from minivllm_plugin import LLM, SamplingParams

OF_A_LAYER = ("add_rms_norm", "norm_rotary_store", "attention", "silu_and_mul", "argmax")
NEW_TOKENS = 5
PROMPTS = [[5, 9, 11, 3, 60, 2, 7], [8, 1]]


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Takes the backends that run the ops from now on."""

    def take(backends: str) -> None:
        monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, backends)
        dispatch.choose.cache_clear()

    yield take
    monkeypatch.undo()
    dispatch.choose.cache_clear()


def greedy(directory: Path) -> list[list[int]]:
    """Prompts in one batch, the first in two chunks, then a token a step for both."""
    driver = Driver(load_directory(directory), block_size=4)
    tables = [driver.table(len(prompt) + NEW_TOKENS) for prompt in PROMPTS]
    driver.step([PROMPTS[0][:3]], [0], [tables[0]])
    logits = driver.step([PROMPTS[0][3:], PROMPTS[1]], [3, 0], tables)
    rows = [list(prompt) for prompt in PROMPTS]
    for _ in range(NEW_TOKENS):
        for row, out in zip(rows, logits, strict=True):
            row.append(int(argmax(out[-1:])))
        logits = driver.step([row[-1:] for row in rows], [len(row) - 1 for row in rows], tables)
    assert all(bool(torch.isfinite(out).all()) for out in logits)
    return rows


@pytest.mark.parametrize("shape", ["llama, 9:3 heads, tied", "qwen3, heads wider than hidden, untied"])
def test_greedy_tokens_are_the_references(shape: str, tmp_path: Path, force: Callable[[str], None]) -> None:
    reference_model(*SHAPES[shape]).save_pretrained(tmp_path)
    force("reference")
    expected = greedy(tmp_path)
    force("interpreter,reference")
    assert greedy(tmp_path) == expected
    assert {op: dispatch.choose(op, "cpu").backend for op in OF_A_LAYER} == dict.fromkeys(OF_A_LAYER, "interpreter")


def test_an_engine_gives_the_references_tokens(tmp_path: Path, force: Callable[[str], None]) -> None:
    """Scheduler, block tables and sampler as they are served: two prompts, a seed, and a prefix that is found again."""
    reference_model(*SHAPES["qwen3, heads wider than hidden, untied"]).save_pretrained(tmp_path)
    greedily = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    drawn = SamplingParams(temperature=1.0, top_p=0.9, seed=3, max_tokens=4, ignore_eos=True)

    def answer(backends: str) -> list[list[int]]:
        force(backends)
        with LLM(str(tmp_path), dtype="float32", block_size=4, max_model_len=32) as llm:
            first = llm.generate(PROMPTS, [greedily, drawn], use_tqdm=False)
            again = llm.generate(PROMPTS[:1], greedily, use_tqdm=False)
        return [request.outputs[0].token_ids for request in (*first, *again)]

    assert answer("interpreter,reference") == answer("reference")
