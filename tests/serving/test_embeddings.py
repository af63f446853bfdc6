"""Embeddings equal transformers' hidden states, pooled; whatever the company, and however a caller leaves."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoints import tiny_checkpoint
from waiting import wait_until

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import (
    ConfigError,
    InvalidRequestError,
    RequestFailedError,
    UnsupportedFeatureError,
)
from minivllm_plugin.serving.embedding import shortened
from minivllm_plugin.testing import scripted_llm

KERNELS = ["reference", "cpu"]
TEXTS = [[5, 9, 11, 3, 60, 7, 7, 20, 31], [5, 9, 11, 3, 60, 7, 7, 8], [44], [1, 2], list(range(40, 70)), [5, 9, 11, 3, 60]]


@pytest.fixture(scope="module", params=["Llama", "Qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return tiny_checkpoint(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(params=KERNELS)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name: str = request.param
    monkeypatch.setenv("MINIVLLM_KERNELS", name if name == "reference" else "cpu,reference")
    return name


def load(checkpoint: tuple[Path, Any], **options: Any) -> LLM:
    return LLM(str(checkpoint[0]), dtype="float32", **{"num_blocks": 64, "block_size": 4, **options})


def by_transformers(reference: Any, tokens: list[int], pooling: str) -> list[float]:
    with torch.inference_mode():
        hidden = reference.model(torch.tensor([tokens])).last_hidden_state[0].float()
    pooled = hidden[-1] if pooling == "last" else hidden.mean(dim=0)
    return torch.nn.functional.normalize(pooled, dim=0).tolist()  # type: ignore[no-any-return]


def vectors(llm: LLM, texts: list[list[int]] = TEXTS, **options: Any) -> list[list[float]]:
    return [output.embedding for output in llm.embed(texts, use_tqdm=False, **options)]


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 3, "max_num_sequences": 3},
        {"num_blocks": 9, "max_num_sequences": 4},
        {"enable_chunked_prefill": False},
        {"enable_prefix_caching": False},
    ],
)
def test_vectors_are_those_of_transformers(checkpoint: tuple[Path, Any], pooling: str, options: dict[str, Any]) -> None:
    expected = [by_transformers(checkpoint[1], tokens, pooling) for tokens in TEXTS]
    with load(checkpoint, pooling=pooling, **options) as llm:
        llm.generate(TEXTS, SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True), use_tqdm=False)  # the cache is warm
        for _ in range(2):
            outputs = llm.embed(TEXTS, use_tqdm=False)
            for output, tokens, vector in zip(outputs, TEXTS, expected, strict=True):
                assert output.embedding == pytest.approx(vector, abs=1e-4)
                assert output.prompt_token_ids == tokens
                assert math.fsum(value * value for value in output.embedding) == pytest.approx(1.0, abs=1e-5)
                if pooling == "mean":
                    assert output.num_cached_tokens == 0  # every token is needed, so the cache is not read
        alone = [vectors(llm, [tokens])[0] for tokens in TEXTS]
        assert alone == [pytest.approx(vector, abs=1e-4) for vector in expected]


@pytest.mark.usefixtures("kernels")
def test_the_last_token_s_vector_may_use_the_cache(checkpoint: tuple[Path, Any]) -> None:
    with load(checkpoint) as llm:
        first = llm.embed([TEXTS[4]], use_tqdm=False)[0]
        second = llm.embed([TEXTS[4]], use_tqdm=False)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 28)
    assert second.embedding == pytest.approx(first.embedding, abs=1e-5)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_beside_requests_that_generate(checkpoint: tuple[Path, Any], pooling: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with load(checkpoint, pooling=pooling, max_num_batched_tokens=8, max_num_sequences=6, num_blocks=24) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(TEXTS, params, use_tqdm=False)]
        streams = [llm.submit(tokens, params) for tokens in TEXTS]
        handles = [llm.submit_embedding(tokens) for tokens in TEXTS]
        for handle, tokens in zip(handles, TEXTS, strict=True):
            assert handle.result().embedding == pytest.approx(by_transformers(checkpoint[1], tokens, pooling), abs=1e-4)
        assert [stream.result().outputs[0].token_ids for stream in streams] == expected


@pytest.mark.usefixtures("kernels")
def test_pooling_is_taken_from_the_model_s_own_files(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint(tmp_path, "Qwen3")
    place = tmp_path / "1_Pooling" / "config.json"
    place.parent.mkdir()
    for mode, pooling in (("pooling_mode_mean_tokens", "mean"), ("pooling_mode_lasttoken", "last")):
        place.write_text(json.dumps({"word_embedding_dimension": 32, mode: True, "pooling_mode_cls_token": False}))
        with load(checkpoint) as llm:
            assert vectors(llm)[0] == pytest.approx(by_transformers(checkpoint[1], TEXTS[0], pooling), abs=1e-4)
        with load(checkpoint, pooling="mean") as llm:
            assert vectors(llm)[0] == pytest.approx(by_transformers(checkpoint[1], TEXTS[0], "mean"), abs=1e-4)
    place.write_text(json.dumps({"pooling_mode_cls_token": True}))
    with pytest.raises(ConfigError, match="pooling_mode_cls_token"):
        load(checkpoint)


@pytest.mark.usefixtures("kernels")
def test_fewer_dimensions(checkpoint: tuple[Path, Any]) -> None:
    whole = by_transformers(checkpoint[1], TEXTS[0], "last")
    length = math.sqrt(sum(value * value for value in whole[:5]))
    with load(checkpoint) as llm:
        assert vectors(llm, TEXTS[:1], dimensions=5)[0] == pytest.approx([value / length for value in whole[:5]], abs=1e-4)
        assert vectors(llm, TEXTS[:1], dimensions=32)[0] == pytest.approx(whole, abs=1e-4)
        for dimensions in (0, -1, True, 1.5, "5"):
            with pytest.raises(InvalidRequestError, match="dimensions"):
                llm.submit_embedding(TEXTS[0], dimensions=dimensions)  # type: ignore[arg-type]
        handle = llm.submit_embedding(TEXTS[0], dimensions=33)
        for _ in range(2):  # the second time it must not wait for what will never come
            with pytest.raises(InvalidRequestError, match=r"dimensions=33 must be between 1 and the model's 32"):
                handle.result()
        wait_until(lambda: llm.snapshot().num_running == 0)


def test_a_vector_of_zeros_stays_one() -> None:
    assert shortened([0.0, 0.0, 1.0], 2) == [0.0, 0.0]


@pytest.mark.usefixtures("kernels")
def test_what_is_not_finite_fails_alone(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint[0] / name).read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][90] = math.nan
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with load((tmp_path, None)) as llm:
        bad, good = llm.submit_embedding([5, 90]), llm.submit_embedding(TEXTS[0])
        with pytest.raises(RequestFailedError, match="hidden states were not finite"):
            bad.result()
        with pytest.raises(RequestFailedError):
            bad.result()
        assert good.result().embedding == pytest.approx(by_transformers(checkpoint[1], TEXTS[0], "last"), abs=1e-4)
        with pytest.raises(RequestFailedError):  # what it left in the cache is not offered to others, nor hides the fault
            llm.submit_embedding([5, 90]).result()


# --- engines that cannot ------------------------------------------------------------------------------------------------


def test_an_engine_without_hidden_states_refuses_and_goes_on() -> None:
    llm, _ = scripted_llm()
    with llm:
        with pytest.raises(UnsupportedFeatureError, match="no embeddings"):
            llm.embed([[1, 2]], use_tqdm=False)
        handle = llm.submit_embedding([1, 2])
        for _ in range(2):
            with pytest.raises(UnsupportedFeatureError):
                handle.result()
        assert llm.generate([1, 2], use_tqdm=False)[0].finished
