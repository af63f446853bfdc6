"""Whole generations on the CPU kernels: the same tokens alone, in company, chunked, preempted, and from a warm prefix."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cpu_models import build_module, model_config, need_cpu_kernels, use_private_cache, write_checkpoint
from settled import settled_snapshot

from minivllm_plugin import LLM, SamplingParams

VOCABULARY = 500
NEW_TOKENS = 45
SETTINGS: dict[str, dict[str, Any]] = {
    "int8": {},  # the default on a CPU
    "int8, int8 cache": {"kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of two layers, in a cache of its own."""
    need_cpu_kernels()
    place = tmp_path_factory.mktemp("generations")
    with pytest.MonkeyPatch.context() as patch:
        use_private_cache(place / "cache", patch)
        module = build_module(model_config("Qwen3", vocab_size=VOCABULARY, hidden_size=128, max_position_embeddings=512))
        yield write_checkpoint(module, place / "model")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """32 of 1 to 200 tokens; every fourth continues an earlier one, so that prefixes are shared."""
    rng = random.Random(3)
    made: list[list[int]] = [[7]]
    while len(made) < 32:
        fresh = [rng.randrange(VOCABULARY) for _ in range(rng.choice((3, 17, 40, rng.randint(1, 120))))]
        made.append([*made[rng.randrange(len(made))], *fresh][:200] if len(made) % 4 == 0 else fresh)
    return made


def params(index: int) -> SamplingParams:
    """Every third request draws with a seed; lengths differ, so that requests leave at different steps."""
    drawn = {"temperature": 0.9, "top_p": 0.95, "seed": index} if index % 3 == 2 else {"temperature": 0.0}
    return SamplingParams(max_tokens=NEW_TOKENS - index % 7, ignore_eos=True, **drawn)  # type: ignore[arg-type]


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, [params(index) for index in range(len(prompts))], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module", params=list(SETTINGS))
def case(
    request: pytest.FixtureRequest, directory: Path, prompts: list[list[int]]
) -> tuple[Path, dict[str, Any], list[list[int]]]:
    """The checkpoint, settings, and each request's tokens when it is alone in a cold engine."""
    settings = SETTINGS[request.param]
    with LLM(str(directory), enable_prefix_caching=False, num_blocks=64, **settings) as llm:
        expected = [
            llm.generate([prompt], params(index), use_tqdm=False)[0].outputs[0].token_ids for index, prompt in enumerate(prompts)
        ]
    assert len({tuple(each) for each in expected}) > 28
    return directory, settings, expected


@pytest.mark.parametrize("count", [1, 7, 32])
def test_in_company_then_from_a_warm_prefix(case: Any, prompts: list[list[int]], count: int) -> None:
    directory, settings, expected = case
    with LLM(str(directory), num_blocks=512, **settings) as llm:
        assert tokens(llm, prompts[:count]) == expected[:count]
        before = settled_snapshot(llm).prefix_hit_tokens
        assert tokens(llm, prompts[:count]) == expected[:count]
        hits = settled_snapshot(llm).prefix_hit_tokens - before
        assert hits >= sum((len(prompt) - 1) // 16 * 16 for prompt in prompts[:count])


@pytest.mark.parametrize(("budget", "running"), [(64, 32), (16, 7), (5, 4)])
def test_chunked(case: Any, prompts: list[list[int]], budget: int, running: int) -> None:
    directory, settings, expected = case
    options = {"max_num_batched_tokens": budget, "max_num_sequences": running, "enable_prefix_caching": False}
    with LLM(str(directory), num_blocks=512, **options, **settings) as llm:
        assert tokens(llm, prompts) == expected


@pytest.mark.parametrize("caching", [True, False], ids=["cached", "uncached"])
def test_preempted_in_a_tiny_pool(case: Any, prompts: list[list[int]], caching: bool) -> None:
    directory, settings, expected = case
    with LLM(str(directory), num_blocks=17, enable_prefix_caching=caching, **settings) as llm:
        assert tokens(llm, prompts) == expected
        assert settled_snapshot(llm).num_preemptions > 3
        assert settled_snapshot(llm).num_free_blocks == llm.num_blocks


@pytest.mark.parametrize(("block_size", "threads"), [(16, 1), (32, 3), (48, 2), (8, 2)])
def test_other_block_sizes_and_threads(case: Any, prompts: list[list[int]], block_size: int, threads: int) -> None:
    directory, settings, expected = case
    if block_size % 16 and settings.get("kv_cache_dtype") == "int8":
        pytest.skip("an int8 cache needs blocks of a multiple of 16")
    with LLM(str(directory), num_blocks=512, block_size=block_size, num_threads=threads, **settings) as llm:
        assert tokens(llm, prompts) == expected


def test_two_engines_at_once(directory: Path, prompts: list[list[int]]) -> None:
    """Different kinds in one process, both busy: each as if alone."""
    with LLM(str(directory), num_blocks=512) as bytes_, LLM(str(directory), num_blocks=512, dtype="float32") as exact:
        alone = [tokens(engine, prompts[:8]) for engine in (bytes_, exact)]
        both = [[engine.submit(prompt, params(i)) for i, prompt in enumerate(prompts[:8])] for engine in (bytes_, exact)]
        together = [[stream.result(timeout=300).outputs[0].token_ids for stream in streams] for streams in both]
    assert together == alone
