"""The promises, kept by the real SmolLM2-135M: greedy tokens equal transformers' in float32, whatever the circumstances.

The compiled CPU kernels compute where they can be built; ``MINIVLLM_KERNELS=reference`` puts plain torch through the same tests.

The reference is what ``transformers.generate`` gives on the same dequantised weights, one prompt at a time.
"""

import asyncio
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from settled import settled_snapshot

from minivllm_plugin import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow]

NUM_PROMPTS = 50
NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS)

SENTENCES = [
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    if n < 2:\n        return",
    "Water boils at 100 degrees Celsius because",
    "The three most important inventions of the 20th century were",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The mitochondria are",
    "In 1969, Neil Armstrong",
    "La tour Eiffel se trouve à",
]
QUESTIONS = [
    "What is the capital of Italy?",
    "Explain gravity to a child.",
    "Write a haiku about rain.",
    "List three prime numbers.",
    "How do I sort a list in Python?",
    "Who wrote Hamlet?",
    "Translate 'good morning' into French.",
    "Why is the sky blue?",
]


def make_prompts(llm: LLM) -> list[list[int]]:
    """Raw text, chats, and mixtures of up to a few hundred tokens, some sharing beginnings."""
    assert llm.tokenizer is not None
    from minivllm_plugin.serving.chat import render_chat

    rng = random.Random(0)
    prompts = [llm.tokenizer.encode(text) for text in SENTENCES]
    prompts += [render_chat(llm.tokenizer, [{"role": "user", "content": text}]) for text in QUESTIONS]
    while len(prompts) < NUM_PROMPTS:
        text = " ".join(rng.choice(SENTENCES + QUESTIONS) for _ in range(rng.randint(1, 14)))
        if len(prompts) % 3 == 0:
            prompts.append(render_chat(llm.tokenizer, [{"role": "user", "content": text}]))
        else:
            prompts.append(llm.tokenizer.encode(text))
    return prompts


@pytest.fixture(scope="module")
def model_directory(smollm2_gguf: Path) -> Path:
    from minivllm_plugin.models.catalog import resolve
    from minivllm_plugin.models.loader import load_model

    directory = load_model(resolve(str(smollm2_gguf))).directory
    assert directory is not None
    return directory


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_gguf), dtype="float32") as engine:
        yield engine


@pytest.fixture(scope="module")
def prompts(llm: LLM) -> list[list[int]]:
    return make_prompts(llm)


@pytest.fixture(scope="module")
def expected(model_directory: Path, prompts: list[list[int]], llm: LLM) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_directory, dtype=torch.float32)
    assert llm.tokenizer is not None
    ends = list(llm.tokenizer.eos_token_ids)
    # Tokens that transformers would choose itself, each after those before it, are what it generates: that takes one pass.
    guesses = [llm.submit(prompt, GREEDY, cache_salt="guesses") for prompt in prompts]
    results = []
    with torch.inference_mode():
        for prompt, guess in zip(prompts, guesses, strict=True):
            found = guess.result().outputs[0].token_ids
            logits = model(torch.tensor([prompt + found]), logits_to_keep=len(found) + 1).logits[0, :-1]
            ended = [token in ends for token in found]
            whole = not any(ended[:-1]) and (ended[-1] or len(found) == NEW_TOKENS)
            results.append(found if whole and logits.argmax(-1).tolist() == found else _generated(model, prompt, ends))
    return results


def _generated(model: Any, prompt: list[int], ends: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": ends, "pad_token_id": ends[0]}
    return list(model.generate(ids, attention_mask=mask, **settings)[0, len(prompt) :].tolist())


def tokens(llm: LLM, prompts: Any) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def test_the_prompts_are_worth_comparing(expected: list[list[int]]) -> None:
    assert len(expected) == NUM_PROMPTS
    assert len({tuple(completion) for completion in expected}) > NUM_PROMPTS // 2
    assert any(len(completion) < NEW_TOKENS for completion in expected)  # some end by themselves


def test_alone(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert [tokens(llm, [prompt])[0] for prompt in prompts] == expected


def test_batched_and_from_a_warm_prefix(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    before = settled_snapshot(llm).prefix_hit_tokens
    assert tokens(llm, prompts) == expected
    assert settled_snapshot(llm).prefix_hit_tokens > before + 1000


def test_batched_cold(smollm2_gguf: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    with LLM(str(smollm2_gguf), dtype="float32", enable_prefix_caching=False) as engine:
        assert tokens(engine, prompts) == expected


@pytest.mark.parametrize("budget", [64, 7])
def test_chunked(smollm2_gguf: Path, prompts: list[list[int]], expected: list[list[int]], budget: int) -> None:
    some = slice(0, NUM_PROMPTS, 1 if budget > 10 else 4)
    with LLM(
        str(smollm2_gguf), dtype="float32", max_num_batched_tokens=budget, max_num_sequences=7, enable_prefix_caching=False
    ) as engine:
        assert tokens(engine, prompts[some]) == expected[some]


def test_preempted_in_a_tiny_pool(smollm2_gguf: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    longest = max(len(prompt) for prompt in prompts) + NEW_TOKENS
    with LLM(str(smollm2_gguf), dtype="float32", num_blocks=-(-longest // 8) + 6, block_size=8) as engine:
        assert tokens(engine, prompts) == expected
        assert settled_snapshot(engine).num_preemptions > 5
        assert settled_snapshot(engine).num_free_blocks == engine.num_blocks


def test_streamed_from_threads_and_coroutines(llm: LLM, prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert llm.tokenizer is not None

    def read(prompt: list[int]) -> tuple[list[int], str]:
        deltas = list(llm.stream(prompt, GREEDY))
        return [token for delta in deltas for token in delta.token_ids], "".join(delta.text for delta in deltas)

    async def aread(prompt: list[int]) -> tuple[list[int], str]:
        deltas = [delta async for delta in llm.stream(prompt, GREEDY)]
        return [token for delta in deltas for token in delta.token_ids], "".join(delta.text for delta in deltas)

    async def main() -> list[tuple[list[int], str]]:
        return await asyncio.gather(*(aread(prompt) for prompt in prompts[25:]))

    with ThreadPoolExecutor(25) as pool:
        results = [*pool.map(read, prompts[:25]), *asyncio.run(main())]
    assert [completion for completion, _ in results] == expected
    for completion, text in results:
        assert text == llm.tokenizer.decode(completion)


def test_a_seed_gives_the_same_answer_alone_and_in_a_crowd(llm: LLM, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0.8, top_p=0.9, top_k=50, seed=11, max_tokens=16)
    alone = llm.generate(prompts[0], params, use_tqdm=False)[0].outputs[0].token_ids
    crowd = [params, *[SamplingParams(temperature=1.0, max_tokens=16)] * 7]
    assert llm.generate(prompts[:8], crowd, use_tqdm=False)[0].outputs[0].token_ids == alone


def test_a_chat_answers_and_stops_at_a_stop_string(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0.0, max_tokens=40)
    whole = llm.chat(messages, params, use_tqdm=False)[0].outputs[0]
    assert "Paris" in whole.text
    assert whole.finish_reason == "stop"
    cut = llm.chat(messages, params.replace(stop=["is Par"]), use_tqdm=False)[0].outputs[0]
    assert cut.text == whole.text[: whole.text.index("is Par")]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", "is Par")
