"""Whole engines over tiny random models: greedy tokens equal transformers' in float32, through compiled kernels and plain torch.

Each shape runs batched, in chunks, preempted in a tiny pool, from a warm prefix and with other block sizes (trials A09, B08, F09,
J05); what the runner allocated is what the scheduler hands out.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from settled import settled_snapshot
from tiny_models import SHAPES, load_directory, reference_model

from minivllm_kernels import dispatch
from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.runner.model_runner import ModelRunner

NEW_TOKENS = 10
EVEN = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "num_key_value_heads": 2}
SHAPES_OF_KERNELS: dict[str, tuple[str, dict[str, Any]]] = {  # sizes that the compiled CPU kernels take
    "llama, 9:3 heads, tied, for kernels": (
        "Llama",
        {
            **EVEN,
            "hidden_size": 288,
            "intermediate_size": 64,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2, for kernels": ("Qwen2", {**EVEN, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}),
    "qwen3, for kernels": (
        "Qwen3",
        {**EVEN, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 6, "head_dim": 32},
    ),
}
ALL_SHAPES = SHAPES | SHAPES_OF_KERNELS
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"max_num_batched_tokens": 5, "max_num_sequences": 3},
    "no chunks": {"enable_chunked_prefill": False, "max_num_batched_tokens": 128},
    "tiny pool": {"num_blocks": 14, "block_size": 4},
    "blocks of 8": {"block_size": 8, "num_blocks": 40},
    "blocks of 32": {"block_size": 32, "num_blocks": 24},
    "no cache": {"enable_prefix_caching": False},
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(3)
    shared = [rng.randrange(3, 97) for _ in range(17)]
    return [shared[: rng.randrange(18)] + [rng.randrange(3, 97) for _ in range(rng.randint(1, 20))] for _ in range(9)]


@pytest.fixture(scope="module", params=list(ALL_SHAPES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A saved model, and what transformers answers to each prompt alone."""
    reference = reference_model(*ALL_SHAPES[request.param])
    directory = tmp_path_factory.mktemp("model")
    reference.save_pretrained(directory)
    answers = []
    with torch.inference_mode():
        for prompt in make_prompts():
            ids = torch.tensor([prompt])
            out = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            answers.append(out[0, len(prompt) :].tolist())
    return directory, answers


@pytest.fixture(params=["auto", "reference"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The best that this machine has, and plain torch."""
    if request.param != "auto":
        monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, request.param)
    dispatch.choose.cache_clear()
    yield request.param
    monkeypatch.undo()
    dispatch.choose.cache_clear()


@pytest.mark.parametrize("way", WAYS)
def test_greedy_tokens_equal_transformers(model: tuple[Path, list[list[int]]], kernels: str, way: str) -> None:
    directory, expected = model
    with LLM(str(directory), dtype="float32", **WAYS[way]) as llm:
        assert kernels == "auto" or llm.kernels == "torch"
        for _ in range(2):  # the second time from a warm prefix
            outputs = llm.generate(make_prompts(), GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == expected
        snapshot = settled_snapshot(llm)
        assert snapshot.num_free_blocks == snapshot.num_blocks == llm.num_blocks
        assert (snapshot.prefix_hit_tokens > 0) == (way != "no cache")
        assert (snapshot.num_preemptions > 0) == (way == "tiny pool")


@pytest.mark.parametrize("block_size", [1, 8, 32])
def test_the_pool_is_what_the_runner_allocated(tmp_path: Path, block_size: int) -> None:  # J05
    reference_model(*next(iter(SHAPES.values()))).save_pretrained(tmp_path)
    loaded = load_directory(tmp_path)
    cache = ModelRunner(loaded, ()).allocate_kv_cache(11, block_size)
    shapes = {tuple(tensor.shape) for pair in cache.layers for tensor in pair}
    assert shapes == {(11, block_size, loaded.config.num_kv_heads, loaded.config.head_dim)}
    assert (cache.num_blocks, cache.block_size, len(cache.layers)) == (11, block_size, loaded.config.num_layers)
    assert cache.num_bytes == sum(tensor.nbytes for pair in cache.layers for tensor in pair)


def test_a_pool_that_no_memory_holds_is_refused_with_the_remedy(tmp_path: Path) -> None:
    reference_model(*next(iter(SHAPES.values()))).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"num_blocks=1000000000000000.*lower num_blocks or kv_cache_bytes"):
        ModelRunner(load_directory(tmp_path), ()).allocate_kv_cache(10**15, 16)
