"""SmolLM2-135M with weights made into bytes: the same tokens alone, in company, chunked, preempted, and from a warm prefix."""

import random
from pathlib import Path
from typing import Any

import pytest
from cpu_models import need_cpu_kernels
from settled import settled_snapshot

from minivllm_plugin import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

NEW_TOKENS = 24
WINDOW = 512
SUBJECTS = ["the sea", "prime numbers", "a small village", "gravity", "bread", "Rome", "the moon", "a quiet engine"]
STARTS = ["Write a long story about", "The most important fact about", "Once upon a time there was", "def describe():\n    # of"]


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    need_cpu_kernels()


def engine(gguf: Path, **options: Any) -> LLM:
    return LLM(str(gguf), **{"quantization": "int8", "max_model_len": WINDOW, **options})


@pytest.fixture(scope="module")
def prompts(smollm2_gguf: Path) -> list[list[int]]:
    """32 texts of 6 to 80 tokens, each a beginning and a few of the others."""
    rng = random.Random(0)
    texts = [f"{STARTS[i % 4]} {SUBJECTS[i % 8]} and {SUBJECTS[(i * 3 + i // 8) % 8]}" for i in range(32)]
    texts = [" ".join([text, *rng.sample(texts, rng.randint(0, 6))]) for text in texts]
    with engine(smollm2_gguf, num_blocks=WINDOW // 16) as llm:
        assert llm.tokenizer is not None
        return [llm.tokenizer.encode(text) for text in texts]


def params(index: int) -> SamplingParams:
    """Every third request draws with a seed; lengths differ, so that requests leave at different steps."""
    if index % 3 == 2:
        return SamplingParams(max_tokens=NEW_TOKENS, temperature=0.8, top_p=0.95, seed=index, ignore_eos=True)
    return SamplingParams(max_tokens=NEW_TOKENS - index % 7, temperature=0.0, ignore_eos=True)


def tokens(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = llm.generate(prompts, [params(index) for index in range(len(prompts))], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def alone(smollm2_gguf: Path, prompts: list[list[int]]) -> list[list[int]]:
    with engine(smollm2_gguf, enable_prefix_caching=False) as llm:
        answers = [
            llm.generate([prompt], params(index), use_tqdm=False)[0].outputs[0].token_ids for index, prompt in enumerate(prompts)
        ]
    assert len({tuple(answer) for answer in answers}) > 28
    return answers


@pytest.mark.parametrize("count", [7, 32])
def test_in_company_then_from_a_warm_prefix(
    smollm2_gguf: Path, prompts: list[list[int]], alone: list[list[int]], count: int
) -> None:
    with engine(smollm2_gguf) as llm:
        assert tokens(llm, prompts[:count]) == alone[:count]
        assert tokens(llm, prompts[:count]) == alone[:count]
        assert settled_snapshot(llm).prefix_hit_tokens > 16 * count


def test_chunked_and_preempted(smollm2_gguf: Path, prompts: list[list[int]], alone: list[list[int]]) -> None:
    longest = max(map(len, prompts)) + NEW_TOKENS
    options = {"max_num_batched_tokens": 40, "max_model_len": longest, "num_blocks": -(-longest // 16) + 8}
    with engine(smollm2_gguf, **options) as llm:
        assert tokens(llm, prompts) == alone
        assert settled_snapshot(llm).num_preemptions > 0


def test_an_int8_cache_too(smollm2_gguf: Path, prompts: list[list[int]]) -> None:
    with engine(smollm2_gguf, kv_cache_dtype="int8", enable_prefix_caching=False) as llm:
        single = [llm.generate([prompt], params(index), use_tqdm=False)[0] for index, prompt in enumerate(prompts[:7])]
        assert tokens(llm, prompts[:7]) == [output.outputs[0].token_ids for output in single]
