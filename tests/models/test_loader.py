"""dtypes, device, modes; what generation_config.json adds; dummy weights."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import PLAIN_LLAMA, SOME_TOKENS, Driver, edit_config, load_directory, reference_logits, reference_model, rewrite

from minivllm_plugin.errors import ConfigError, ModelLoadError
from minivllm_plugin.models import loader
from minivllm_plugin.models.catalog import ModelSource, resolve
from minivllm_plugin.models.loader import load_model


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model("Llama", PLAIN_LLAMA)


@pytest.fixture
def single(reference: Any, tmp_path: Path) -> Path:
    """config.json and one model.safetensors."""
    reference.save_pretrained(tmp_path / "single")
    return tmp_path / "single"


# dtype, device, modes


def test_auto_is_float32_on_a_cpu_and_says_so(single: Path, reference: Any, caplog: Any) -> None:
    edit_config(single, dtype="bfloat16")
    caplog.set_level(logging.INFO)
    assert load_directory(single).dtype == torch.float32
    assert "float32" in caplog.text
    assert "bfloat16" in caplog.text


def test_auto_is_the_checkpoints_dtype_for_big_models(single: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setattr(loader, "FLOAT32_PARAMETERS_ON_CPU", 1000)
    edit_config(single, dtype="bfloat16")
    caplog.set_level(logging.INFO)
    loaded = load_directory(single)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}
    assert caplog.records == []


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("used", ["float32", "bfloat16", "float16"])
def test_any_stored_dtype_becomes_any_used_one(single: Path, stored: torch.dtype, used: str) -> None:
    rewrite(single, lambda tensors: tensors.update({name: tensor.to(stored) for name, tensor in tensors.items()}))
    loaded = load_directory(single, dtype=used)
    expected = load_file(single / "model.safetensors")["model.embed_tokens.weight"].to(loaded.dtype)
    assert torch.equal(loaded.module.model.embed_tokens.weight, expected)


def test_the_model_is_for_inference_and_owns_its_memory(single: Path, reference: Any) -> None:
    loaded = load_directory(single)
    (single / "model.safetensors").write_bytes(b"overwritten while the model is in use")
    assert not loaded.module.training
    assert not any(parameter.requires_grad for parameter in loaded.module.parameters())
    assert not any(parameter.is_meta for parameter in loaded.module.parameters())
    logits = Driver(loaded).run(SOME_TOKENS, [len(SOME_TOKENS)])
    torch.testing.assert_close(logits, reference_logits(reference, SOME_TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("options", [{"dtype": "int8"}, {"device": "warp9"}, {"load_format": "pickle"}])
def test_an_impossible_argument_is_named(single: Path, options: dict[str, str]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        load_directory(single, **options)


def test_max_positions_bounds_the_rotary_table_only(single: Path, reference: Any) -> None:
    loaded = load_directory(single, max_positions=16)
    assert loaded.module.model.rotary.cos_sin.shape == (16, 16)
    assert loaded.config.max_position_embeddings == 128
    assert load_directory(single, max_positions=10**6).module.model.rotary.cos_sin.shape == (128, 16)
    torch.testing.assert_close(Driver(loaded).run(SOME_TOKENS, [5]), reference_logits(reference, SOME_TOKENS), atol=1e-4, rtol=0)


# generation_config.json and tokenizer files


def test_generation_config_adds_end_tokens_and_sampling_defaults(single: Path) -> None:
    content = {"eos_token_id": [7, 2], "temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "max_length": 10}
    (single / "generation_config.json").write_text(json.dumps(content))
    loaded = load_directory(single)
    assert loaded.config.eos_token_ids == (7, 2)
    assert loaded.generation_defaults == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}


@pytest.mark.parametrize("content", ['{"temperature": "hot"}', '{"eos_token_id": "end"}', "{"])
def test_a_broken_generation_config_is_named(single: Path, content: str) -> None:
    (single / "generation_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        load_directory(single)


def test_the_directory_is_given_only_if_it_has_a_tokenizer(single: Path) -> None:
    assert load_directory(single).directory is None
    (single / "tokenizer.json").write_text("{}")
    assert load_directory(single).directory == single


# Dummy weights


def dummy(seed: int = 0, **options: Any) -> dict[str, torch.Tensor]:
    architecture = reference_model("Qwen3", PLAIN_LLAMA).config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    loaded = load_model(ModelSource.from_architecture(architecture), load_format="dummy", seed=seed, **options)
    assert loaded.directory is None
    return dict(loaded.module.named_parameters())


def test_dummy_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    first, again, other = dummy(), dummy(), dummy(seed=1)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = dummy()
    finally:
        torch.set_num_threads(threads)
    for name, value in first.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, alone[name])
        assert not torch.equal(value, other[name])
    half = dummy(dtype="bfloat16")
    assert all(torch.equal(half[name], value.bfloat16()) for name, value in first.items())


def test_dummy_weights_have_a_sane_scale() -> None:
    for name, value in dummy().items():
        centre = 1.0 if name.endswith("norm.weight") else 0.0
        assert abs(value.mean().item() - centre) < 0.02, name
        assert 0.01 < value.std().item() < 0.03, name


def test_dummy_catalog_model_touches_no_files(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_directory", None)
    loaded = load_model(resolve("smollm2-135m"), load_format="dummy")
    assert sum(parameter.numel() for parameter in loaded.module.parameters()) == 134_515_008
    assert loaded.config.eos_token_ids == (2,)
    assert not empty_cache.exists()


def test_dummy_weights_in_the_shape_of_a_directory(single: Path) -> None:
    (single / "model.safetensors").unlink()
    (single / "tokenizer.json").write_text("{}")
    loaded = load_directory(single, load_format="dummy")
    assert loaded.config.hidden_size == 32
    assert loaded.directory == single


def test_dummy_weights_of_an_unknown_hub_model_are_refused(empty_cache: Path) -> None:
    with pytest.raises(ModelLoadError, match="someone/something"):
        load_model(resolve("someone/something"), load_format="dummy")
