"""Guessed tokens on the CPU kernels: the very tokens that come without them, greedy and drawn, in every kind of weights."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cpu_models import build_module, model_config, need_cpu_kernels, use_private_cache, write_checkpoint
from settled import settled_snapshot

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import ConfigError

VOCABULARY = 24  # so few that completions of random weights repeat themselves
KINDS: dict[str, dict[str, Any]] = {
    "int8": {},
    "int8, int8 cache": {"kv_cache_dtype": "int8"},
    "int4": {"quantization": "int4"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32": {"dtype": "float32"},
}
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5] * 40, list(range(20)), [7]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    need_cpu_kernels()
    place = tmp_path_factory.mktemp("speculation")
    with pytest.MonkeyPatch.context() as patch:
        use_private_cache(place / "cache", patch)
        module = build_module(model_config("Qwen3", vocab_size=VOCABULARY, hidden_size=128, max_position_embeddings=512))
        yield write_checkpoint(module, place / "model")


def completions(llm: LLM, company: int) -> list[list[int]]:
    params = [
        SamplingParams(max_tokens=120, ignore_eos=True, temperature=temperature, seed=seed, top_p=top_p)
        for temperature, seed, top_p in ((0.0, 1, 1.0), (0.4, 2, 0.9))
    ]
    found: list[list[int]] = []
    requests = [(prompt, one) for prompt in PROMPTS for one in params]
    for start in range(0, len(requests), company):
        group = requests[start : start + company]
        outputs = llm.generate([prompt for prompt, _ in group], [one for _, one in group], use_tqdm=False)
        found += [output.outputs[0].token_ids for output in outputs]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_token_is_the_same(kind: str, directory: Path) -> None:
    with LLM(str(directory), num_speculative_tokens=0, **KINDS[kind]) as llm:
        wanted = completions(llm, 4)
        assert settled_snapshot(llm).num_drafted_tokens == 0
    with LLM(str(directory), **KINDS[kind]) as llm:
        assert completions(llm, 1) == wanted
        assert completions(llm, 3) == wanted
        snapshot = settled_snapshot(llm)
    assert 100 < snapshot.num_accepted_tokens <= snapshot.num_drafted_tokens


def test_only_kernels_with_the_same_bits_in_any_company_may_guess(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_KERNELS", "reference")
    with pytest.raises(ConfigError, match=r"num_speculative_tokens=4 needs the compiled CPU kernels"):
        LLM(str(directory), num_speculative_tokens=4)
    with LLM(str(directory)) as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=30, temperature=0.0), use_tqdm=False)
        assert settled_snapshot(llm).num_drafted_tokens == 0


@pytest.mark.parametrize("value", [-1, True, "3", 1.5])
def test_a_wrong_number_is_refused(value: object, directory: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens must be an integer of at least 0"):
        LLM(str(directory), num_speculative_tokens=value)
