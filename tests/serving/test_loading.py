"""Where model and settings meet: windows, pools, defaults, and what is refused when they do not go together."""

import json
from pathlib import Path
from typing import Any

import pytest

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.models.catalog import CATALOG

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": [2, 3],
    "torch_dtype": "float32",
}


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "eos_token_id": [2, 5]}))
    return str(tmp_path)


def open_tiny(tiny: str, **options: Any) -> LLM:
    return LLM(tiny, load_format="dummy", **options)


def test_the_window_is_the_least_of_model_pool_and_setting(tiny: str) -> None:
    for options, window in (({}, 256), ({"max_model_len": 100}, 100), ({"num_blocks": 5, "block_size": 8}, 40)):
        with open_tiny(tiny, **options) as llm:
            assert llm.max_model_len == window
            prompt = [1] * (window - 1)
            assert len(llm.generate(prompt, SamplingParams(max_tokens=1), use_tqdm=False)[0].outputs[0].token_ids) == 1


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"max_model_len": 257}, "256"),
        ({"max_model_len": 64, "num_blocks": 2}, "max_model_len=64 needs 4 blocks"),
        ({"kv_cache_bytes": 100}, "kv_cache_bytes=100 holds no block"),
        ({"num_blocks": 4, "kv_cache_bytes": 1 << 20}, "give one"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"block_size": True}, "block_size"),
        ({"dtype": "float8"}, "float8"),
        ({"device": "tpu"}, "tpu"),
        ({"quantization": "int3"}, "int3"),
        ({"kv_cache_dtype": "int8", "block_size": 8}, "block size"),
        ({"quantization": "int8", "dtype": "float16"}, "float16"),
        ({"scheduling_policy": "random"}, "random"),
        ({"max_queue_size": -1}, "-1"),
        ({"max_model_len": 200, "max_num_batched_tokens": 64, "enable_chunked_prefill": False}, "chunked"),
        ({"num_threads": 0}, "num_threads"),
        ({"num_threads": 10**6}, "num_threads=1000000.*1024"),
        ({"device": "cpu:x"}, "cpu:x"),
        ({"cuda_graphs": "some"}, "cuda_graphs must be one of lazy, full, off, got 'some'"),
        ({"enforce_eager": 1}, "enforce_eager must be True or False, got 1"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be a share of the device's memory.*1.5"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization"),
        ({"kv_cache_dtype": "fp4"}, "kv_cache_dtype must be one of .*fp8_e4m3.*'fp4'"),
        ({"kv_cache_dtype": "fp8", "quantization": "int8"}, "quantization='int8' needs.*kv_cache_dtype='fp8_e4m3' is not among"),
        ({"revision": "main"}, "revision"),
    ],
    ids=str,
)
def test_impossible_settings_are_named(tiny: str, options: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        open_tiny(tiny, **options)


def test_a_missing_cuda_device_is_named(tiny: str) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(ConfigError, match="CUDA"):
        open_tiny(tiny, device="cuda")


@pytest.mark.parametrize("device", ["mps", "xpu"])
def test_a_device_that_torch_lacks_is_named(tiny: str, device: str) -> None:
    torch = pytest.importorskip("torch")
    if getattr(torch, device).is_available():
        pytest.skip(f"there is such a device: {device}")
    with pytest.raises(ConfigError, match=device):
        open_tiny(tiny, device=device)


def test_the_models_own_sampling_defaults_hold_where_nothing_is_given(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_tiny(tiny) as llm:
        assert llm.default_sampling_params() == SamplingParams(temperature=0.6, top_k=20, max_tokens=None)
    entry = CATALOG["smollm2-135m"]
    monkeypatch.setattr("minivllm_plugin.serving.loading.catalog_entry", lambda name: entry)
    with open_tiny(tiny) as llm:  # the card's advice, and over it what the checkpoint's own file says
        assert llm.default_sampling_params() == SamplingParams(
            **{**entry.sampling, "temperature": 0.6, "top_k": 20, "max_tokens": None}
        )


def test_every_end_token_of_the_files_ends_a_request(tiny: str) -> None:
    with open_tiny(tiny) as llm:
        scheduler_ends: set[int] = set()
        seen = llm.generate([[9, t] for t in range(6, 100)], SamplingParams(max_tokens=40, seed=1), use_tqdm=False)
        for output in seen:
            if output.outputs[0].finish_reason == "stop":
                scheduler_ends.add(output.outputs[0].token_ids[-1])
        assert scheduler_ends <= {2, 3, 5}
        assert scheduler_ends


def test_quantization_none_int8_and_dtypes_give_what_they_say(tiny: str) -> None:
    expected = {"auto": "int8", "none": "float32"}
    for quantization, dtype in expected.items():
        with open_tiny(tiny, quantization=quantization) as llm:
            assert (llm.kernels, llm.dtype) == ("cpu", dtype)
    with open_tiny(tiny, dtype="float16") as llm:
        assert (llm.kernels, llm.dtype) == ("torch", "float16")


@pytest.mark.parametrize("options", [{"num_blocks": 10**12}, {"num_blocks": 10**30}, {"kv_cache_bytes": 10**16}], ids=str)
def test_a_pool_beyond_all_memory_is_named(tiny: str, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="num_blocks"):
        open_tiny(tiny, **options)


def test_a_window_of_one_token_is_refused(tiny: str) -> None:
    with pytest.raises(ConfigError, match="one token"):
        open_tiny(tiny, num_blocks=1, block_size=1)
