"""The real SmolLM2-135M from its GGUF against transformers on the same dequantised weights."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tiny_models import Driver, reference_logits

from minivllm_plugin.models.catalog import resolve
from minivllm_plugin.models.loader import LoadedModel, load_model

pytestmark = pytest.mark.model

QUESTIONS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "def fibonacci(n):",
    "Count from 1 to 20: 1, 2, 3,",
    "Déjà vu 🤗 is a feeling that",
]


@pytest.fixture(scope="module")
def loaded(smollm2_gguf: Path) -> LoadedModel:
    return load_model(resolve("smollm2-135m"))


@pytest.fixture(scope="module")
def reference(loaded: LoadedModel) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(loaded.directory, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def prompts(loaded: LoadedModel) -> list[list[int]]:
    """Chat-rendered and raw, token ids."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(loaded.directory)
    chats = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for text in QUESTIONS
    ]
    return [*chats, *(tokenizer(text).input_ids for text in QUESTIONS)]


def test_what_the_files_say(loaded: LoadedModel) -> None:
    assert loaded.dtype == torch.float32
    assert loaded.config.eos_token_ids == (2, 0)
    assert loaded.config.bos_token_id == 1
    assert loaded.config.tie_word_embeddings
    assert (loaded.config.num_heads, loaded.config.num_kv_heads, loaded.config.max_position_embeddings) == (9, 3, 8192)


def test_logits_and_choices_equal_transformers(loaded: LoadedModel, reference: Any, prompts: list[list[int]]) -> None:
    for tokens in prompts:
        expected = reference_logits(reference, tokens)
        chunks = [len(tokens) // 2, 1, len(tokens) - len(tokens) // 2 - 1] if len(tokens) > 3 else [len(tokens)]
        logits = Driver(loaded, block_size=16).run(tokens, [size for size in chunks if size])
        torch.testing.assert_close(logits, expected, atol=1e-3, rtol=0)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))


def test_greedy_answers_equal_transformers_in_one_batch(loaded: LoadedModel, reference: Any, prompts: list[list[int]]) -> None:
    """Five prompts decode side by side; each gives the tokens that transformers gives it alone."""
    chosen, steps = prompts[:5], 12
    driver = Driver(loaded, block_size=16, num_blocks=128)
    tables = [driver.table(len(tokens) + steps) for tokens in chosen]
    logits = driver.step(chosen, [0] * len(chosen), tables)
    answers = [[int(rows[-1].argmax())] for rows in logits]
    for step in range(steps - 1):
        starts = [len(tokens) + step for tokens in chosen]
        logits = driver.step([answer[-1:] for answer in answers], starts, tables)
        for answer, rows in zip(answers, logits, strict=True):
            answer.append(int(rows[-1].argmax()))
    for tokens, answer in zip(chosen, answers, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([tokens])
            expected = reference.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=steps, max_new_tokens=steps
            )[0, len(tokens) :].tolist()
        ends = [i for i, token in enumerate(answer) if token in loaded.config.eos_token_ids]
        length = ends[0] if ends else steps  # transformers forbids an end token before min_new_tokens
        assert answer[:length] == expected[:length]
