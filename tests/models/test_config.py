"""config.json in all its spellings, and what is refused by name."""

from typing import Any

import pytest
import torch
import transformers
from tiny_models import LLAMA3_ROPE

from minivllm_plugin.errors import ModelLoadError, UnsupportedModelError
from minivllm_plugin.models import ARCHITECTURES, architecture_class
from minivllm_plugin.models.catalog import CATALOG
from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.models.rope import RopeConfig, inverse_frequencies

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


def parse(**changes: Any) -> ModelConfig:
    return ModelConfig.from_hf({key: value for key, value in (BASE | changes).items() if value is not ...})


@pytest.mark.parametrize("entry", CATALOG.values(), ids=lambda entry: entry.name)
def test_every_catalog_architecture_is_understood(entry: Any) -> None:
    config = ModelConfig.from_hf(entry.architecture)
    assert config.architecture in ARCHITECTURES
    assert config.dtype == "bfloat16"
    assert config.eos_token_ids


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_what_transformers_writes_is_read_as_transformers_means_it(family: str) -> None:
    theirs = getattr(transformers, f"{family}Config")(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    ours = ModelConfig.from_hf(theirs.to_dict() | {"architectures": [f"{family}ForCausalLM"]})
    assert ours.head_dim == (getattr(theirs, "head_dim", None) or 16)
    assert ours.rope == RopeConfig(theirs.rope_parameters["rope_theta"], "default", ())
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert (ours.qkv_bias, ours.output_bias) == ((True, False) if family == "Qwen2" else (False, False))


def test_defaults_of_absent_fields() -> None:
    config = parse(num_key_value_heads=..., rms_norm_eps=...)
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (4, 8, 1e-6)
    assert (config.dtype, config.eos_token_ids, config.bos_token_id) == ("float32", (), None)
    assert parse(architectures=["Qwen3ForCausalLM"]).head_dim == 128


def test_rope_in_both_spellings() -> None:
    new = parse(rope_parameters=LLAMA3_ROPE).rope
    old = parse(rope_theta=10000.0, rope_scaling={key: v for key, v in LLAMA3_ROPE.items() if key != "rope_theta"}).rope
    older = parse(rope_scaling={"type": "linear", "factor": 2}).rope
    assert new == old == RopeConfig(10000.0, "llama3", (8.0, 1.0, 4.0, 32.0))
    assert older == RopeConfig(10000.0, "linear", (2.0,))
    assert parse(rope_scaling={"rope_type": "default"}).rope == parse(rope_scaling=None).rope == RopeConfig()


@pytest.mark.parametrize("rope", [LLAMA3_ROPE, {"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0}, {"rope_theta": 1e6}])
def test_frequencies_equal_transformers(rope: dict[str, Any]) -> None:
    """Bit for bit for the plain series: at position 100,000 a difference in the last bit would be a different angle."""
    theirs = transformers.LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters={"rope_type": "default"} | rope)
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    ours = inverse_frequencies(parse(hidden_size=256, num_attention_heads=2, rope_parameters=rope).rope, 128)
    tolerance = 0 if "rope_type" not in rope else 1e-6
    torch.testing.assert_close(ours, module.inv_freq, rtol=tolerance, atol=0)


@pytest.mark.parametrize(
    ("value", "ids"), [(7, (7,)), ([9, 7, 9], (9, 7)), ([], ()), (None, ())]
)  # fmt: skip
def test_end_tokens(value: Any, ids: tuple[int, ...]) -> None:
    assert parse(eos_token_id=value).eos_token_ids == ids


@pytest.mark.parametrize("spelling", [{"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}, {"torch_dtype": "torch.bfloat16"}])
def test_dtype_in_both_spellings(spelling: dict[str, str]) -> None:
    assert parse(**spelling).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*Qwen3ForCausalLM"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, "window 16"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "window 8"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        parse(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False, "sliding_window": 16},
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0},
        {"sliding_window": 16},
    ],
)
def test_a_window_that_no_layer_uses_is_no_obstacle(changes: dict[str, Any]) -> None:
    assert parse(**changes).num_layers == 2


@pytest.mark.parametrize("name", [name for name in BASE if name not in ("num_key_value_heads", "rms_norm_eps")])
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(ModelLoadError, match=name):
        parse(**{name: ...})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"hidden_size": "32"}, "hidden_size"),
        ({"num_hidden_layers": True}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({"hidden_size": 33}, "head_dim"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_parameters": LLAMA3_ROPE | {"low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "factors", "factors": [1.0]}}, "4 numbers"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"eos_token_id": "2"}, "eos_token_id"),
        ({"eos_token_id": [2, -1]}, "eos_token_id"),
        ({"architectures": []}, "architectures"),
    ],
)
def test_an_impossible_field_is_named(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        parse(**changes)


def test_the_table_of_architectures() -> None:
    for name in ARCHITECTURES:
        assert architecture_class(name).__name__ == name
    with pytest.raises(UnsupportedModelError, match="'Mamba'"):
        architecture_class("Mamba")
