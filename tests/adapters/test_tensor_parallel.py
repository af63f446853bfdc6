"""The real SmolLM2-135M on three processes (3 KV heads, 9 query heads), through LiteLLM: text, scores and a schema."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litellm
import pytest

import minivllm_plugin
from minivllm_plugin import LLM, SamplingParams, registry

pytestmark = [pytest.mark.model, pytest.mark.slow]

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
TOKENS = 6
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256}
SCHEMA = {"type": "object", "properties": {"capital": {"enum": ["Paris", "Rome"]}}, "required": ["capital"]}


@pytest.fixture(scope="module")
def name(smollm2_gguf: Path) -> Iterator[str]:
    """A name of its own for the engine, with its options, as a program would set them."""
    minivllm_plugin.configure("capitals-on-three", model="smollm2-135m", tensor_parallel_size=3, **OPTIONS)
    yield "capitals-on-three"
    registry.close("capitals-on-three")


@pytest.fixture(autouse=True)
def _registered() -> None:
    minivllm_plugin.register()


def test_litellm_gets_the_same_answer_from_three_processes(name: str) -> None:
    with LLM("smollm2-135m", **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=2)
        expected = llm.chat(MESSAGES, params, use_tqdm=False)[0].outputs[0]
    answer: Any = litellm.completion(
        model=f"minivllm/{name}", messages=MESSAGES, temperature=0, max_tokens=TOKENS, logprobs=True, top_logprobs=2
    )
    assert answer.choices[0].message.content == expected.text
    assert "Paris" in expected.text
    scores = [entry["logprob"] for entry in answer.choices[0].logprobs["content"]]
    assert expected.logprobs is not None
    chosen = [entries[token].logprob for token, entries in zip(expected.token_ids, expected.logprobs, strict=True)]
    assert scores == pytest.approx(chosen[: len(scores)], abs=1e-3)


def test_a_schema_holds_on_three_processes(name: str) -> None:
    answer: Any = litellm.completion(
        model=f"minivllm/{name}",
        messages=MESSAGES,
        temperature=0,
        max_tokens=20,
        response_format={"type": "json_schema", "json_schema": {"name": "capital", "schema": SCHEMA}},
    )
    assert json.loads(answer.choices[0].message.content) == {"capital": "Paris"}
