"""A model through the interpreted kernels gives the reference's greedy tokens: one prompt, decode steps, a batch of two."""

from pathlib import Path

import pytest
import torch
from tiny_models import SHAPES, Driver, load_directory, reference_model

from minivllm_kernels import dispatch
from minivllm_kernels.triton import ops

NEW_TOKENS = 5
PROMPTS = [[5, 9, 11, 3, 60, 2, 7], [8, 1]]


def greedy(directory: Path) -> list[list[int]]:
    """Prompts in one batch, the first in two chunks, then a token a step for both."""
    driver = Driver(load_directory(directory), block_size=4)
    tables = [driver.table(len(prompt) + NEW_TOKENS) for prompt in PROMPTS]
    driver.step([PROMPTS[0][:3]], [0], [tables[0]])
    logits = driver.step([PROMPTS[0][3:], PROMPTS[1]], [3, 0], tables)
    rows = [list(prompt) for prompt in PROMPTS]
    for _ in range(NEW_TOKENS):
        for row, out in zip(rows, logits, strict=True):
            row.append(int(out[-1].argmax()))
        logits = driver.step([row[-1:] for row in rows], [len(row) - 1 for row in rows], tables)
    assert all(bool(torch.isfinite(out).all()) for out in logits)
    return rows


@pytest.mark.parametrize("shape", ["llama, 9:3 heads, tied", "qwen3, heads wider than hidden, untied"])
def test_greedy_tokens_are_the_references(shape: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_model(*SHAPES[shape]).save_pretrained(tmp_path)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "reference")
    dispatch.choose.cache_clear()
    expected = greedy(tmp_path)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "interpreter,reference")
    dispatch.choose.cache_clear()
    try:
        assert greedy(tmp_path) == expected
        # The ops of a layer came from the kernels under test, all of which there are.
        used = {
            op: dispatch.choose(op, "cpu").backend for op in ("norm_rotary_store", "add_rms_norm", "silu_and_mul", "attention")
        }
        assert {op for op, backend in used.items() if backend == "interpreter"} == set(used) & set(ops.__all__)
    finally:
        dispatch.choose.cache_clear()
