"""Steps that overlap, on a real model in plain torch: token for token what steps that wait give, for every kind of request."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cpu_models import build_module, model_config, write_checkpoint
from settled import settled_snapshot

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.serving.outputs import RequestOutput

VOCABULARY = 60
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked": {"max_num_batched_tokens": 5, "max_num_sequences": 3},
    "tiny pool": {"num_blocks": 9, "block_size": 8},
    "no chunks": {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_model_len": 64},
}
REQUESTS: list[tuple[list[int], SamplingParams]] = [
    ([1, 2, 3], SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)),
    ([5] * 20, SamplingParams(max_tokens=9, temperature=0.9, seed=4)),
    ([1, 2, 3, 4, 9], SamplingParams(max_tokens=14, temperature=0.0, repetition_penalty=1.3)),
    ([8, 9], SamplingParams(max_tokens=7, temperature=0.0, logprobs=2)),
    ([1, 2, 3, 8, 8, 8, 7], SamplingParams(max_tokens=1, temperature=0.0)),
    ([11, 12, 13], SamplingParams(max_tokens=20, temperature=1.2, top_k=5, seed=9, stop_token_ids=(7,))),
    (list(range(30)), SamplingParams(max_tokens=8, temperature=0.0, n=3)),
]


@pytest.fixture(scope="module", params=["Llama", "Qwen3"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("asynchronous")
    config = model_config(request.param, vocab_size=VOCABULARY, hidden_size=64, max_position_embeddings=256)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MINIVLLM_KERNELS", "reference")
        yield write_checkpoint(build_module(config), place / "model")


def outcome(output: RequestOutput) -> list[tuple[Any, ...]]:
    return [(choice.token_ids, choice.finish_reason, choice.stop_reason, bool(choice.logprobs)) for choice in output.outputs]


def run(directory: Path, asynchronous: bool, options: dict[str, Any]) -> list[list[tuple[Any, ...]]]:
    with LLM(str(directory), dtype="float32", async_scheduling=asynchronous, **options) as llm:
        prompts, params = [prompt for prompt, _ in REQUESTS], [one for _, one in REQUESTS]
        together = [outcome(output) for output in llm.generate(prompts, params, use_tqdm=False)]
        again = [outcome(llm.generate([prompt], one, use_tqdm=False)[0]) for prompt, one in REQUESTS[:3]]
        assert again == together[:3]
        snapshot = settled_snapshot(llm)
        assert snapshot.num_free_blocks == snapshot.num_blocks
    return together


@pytest.mark.parametrize("way", WAYS)
def test_every_request_gets_the_same(way: str, directory: Path) -> None:
    assert run(directory, True, WAYS[way]) == run(directory, False, WAYS[way])


def test_the_compiled_kernels_have_nothing_to_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cpu_models import need_cpu_kernels, use_private_cache

    monkeypatch.delenv("MINIVLLM_KERNELS", raising=False)
    need_cpu_kernels()
    use_private_cache(tmp_path / "cache", monkeypatch)
    path = write_checkpoint(build_module(model_config("Llama", vocab_size=VOCABULARY, hidden_size=64)), tmp_path / "model")
    with pytest.raises(ConfigError, match="async_scheduling=True needs a runner on a device of its own"):
        LLM(str(path), async_scheduling=True)
    for value in ("yes", 1):
        with pytest.raises(ConfigError, match="async_scheduling must be True, False or None"):
            LLM(str(path), async_scheduling=value)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_usage_tells_of_cached_tokens_and_of_the_start(asynchronous: bool, directory: Path) -> None:
    with LLM(str(directory), dtype="float32", block_size=8, async_scheduling=asynchronous) as llm:
        outputs = [llm.generate([list(range(20))], SamplingParams(max_tokens=4), use_tqdm=False)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in outputs] == [0, 16]
    assert all(output.metrics is not None and output.metrics.first_scheduled_time is not None for output in outputs)
