"""What the metadata of a GGUF says of the model: the fields of ``config.json``.

Knows three architectures of llama.cpp (llama, qwen2, qwen3) and refuses by name what they may carry and we do not compute.
"""

from typing import Any

import numpy as np

from minivllm_plugin.errors import ModelLoadError, UnsupportedModelError
from minivllm_plugin.models.gguf_file import GGUFFile
from minivllm_plugin.models.gguf_weights import ROPE_FACTORS, dequantized

__all__ = ["hf_config"]

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def hf_config(file: GGUFFile) -> dict[str, Any]:
    """The ``config.json`` of this file, without token ids.

    Raises:
        UnsupportedModelError: architecture, rope scaling, experts, sliding window or a bias that we do not compute.
        ModelLoadError: a key is missing or makes no sense.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UnsupportedModelError(f"GGUF architecture {name!r} in {file.path} is not supported; supported are {known}")
    keys = _Keys(file, name)
    _refuse_unsupported(file, keys)
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if keys.integer("rope.dimension_count", head_dim) != head_dim or keys.integer("attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path}: rotated and value sizes other than the head size {head_dim} are not supported")
    return {
        "architectures": [ARCHITECTURES[name]],
        "model_type": name,
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        **_rope(file, keys, head_dim),
        "attention_bias": _has_bias(file, ("attn_q", "attn_k", "attn_v") + (("attn_output",) if name != "qwen2" else ())),
        "mlp_bias": _has_bias(file, ("ffn_gate", "ffn_up", "ffn_down")),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
    }


class _Keys:
    """Numbers under ``<architecture>.``"""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self._file, self._prefix = file, architecture

    def get(self, key: str, default: Any = None) -> Any:
        return self._file.metadata.get(f"{self._prefix}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]  # given per layer, all alike
        if isinstance(value, list):
            raise UnsupportedModelError(f"{self._prefix}.{key} in {self._file.path} differs by layer, which is not supported")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelLoadError(f"{self._prefix}.{key} in {self._file.path} must be a positive integer, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise ModelLoadError(f"{self._prefix}.{key} in {self._file.path} must be a positive number, got {value!r}")
        return float(str(np.float32(value)))  # the file has 32 bits: write 1e-05, not 9.999999747378752e-06


def _refuse_unsupported(file: GGUFFile, keys: _Keys) -> None:
    splits = file.metadata.get("split.count", 0)
    if isinstance(splits, int) and splits > 1:
        raise UnsupportedModelError(f"{file.path} is one of {splits} parts; merge them into one file first (gguf-split --merge)")
    if keys.get("expert_count", 0):
        raise UnsupportedModelError(f"{file.path} has experts (expert_count={keys.get('expert_count')}), which are not supported")
    window = keys.get("attention.sliding_window", 0)
    if not isinstance(window, int) or 0 < window < keys.integer("context_length"):
        raise UnsupportedModelError(f"{file.path} uses sliding-window attention (window {window}), which is not supported")


def _rope(file: GGUFFile, keys: _Keys, head_dim: int) -> dict[str, Any]:
    theta = keys.number("rope.freq_base", 10000.0)
    kind = keys.get("rope.scaling.type", "linear" if keys.get("rope.scale_linear") else "none")
    if kind not in ("none", "linear"):
        raise UnsupportedModelError(f"rope scaling {kind!r} in {file.path} is not supported; supported are none, linear, llama3")
    factor = keys.number("rope.scaling.factor", keys.get("rope.scale_linear", 1.0)) if kind == "linear" else 1.0
    factors = file.tensors.get(ROPE_FACTORS)
    if factors is None:
        scaling = {"rope_type": "linear", "factor": factor} if factor != 1.0 else {"rope_type": "default"}
        return {"rope_parameters": {"rope_theta": theta, **scaling}}
    if factor != 1.0:
        raise UnsupportedModelError(f"{file.path} has both linear rope scaling and {ROPE_FACTORS}, which is not supported")
    values = dequantized(factors.rows, factors).ravel()
    if len(values) != head_dim // 2:
        raise ModelLoadError(f"{ROPE_FACTORS} in {file.path} has {len(values)} factors, expected {head_dim // 2}")
    return {"rope_parameters": {"rope_theta": theta, "rope_type": "factors", "factors": [float(value) for value in values]}}


def _has_bias(file: GGUFFile, layers: tuple[str, ...]) -> bool:
    """Whether these layers have a bias: all or none, as the architectures here do."""
    found = [layer for layer in layers if f"blk.0.{layer}.bias" in file.tensors]
    if found and len(found) < len(layers):
        missing = ", ".join(layer for layer in layers if layer not in found)
        raise UnsupportedModelError(f"{file.path} has a bias in {', '.join(found)} but none in {missing}, which is not supported")
    return bool(found)


def _dtype(file: GGUFFile) -> str:
    """Type of the converted matrices; norms and biases are F32 in every GGUF and do not count."""
    kinds = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return "bfloat16" if kinds == {"BF16"} else "float16" if kinds == {"F16"} else "float32"


def _vocab_size(file: GGUFFile) -> int:
    """Rows of the embedding: the model's vocabulary, which the tokenizer's may fall short of."""
    if "token_embd.weight" not in file.tensors:
        raise ModelLoadError(f"{file.path} lacks tensor 'token_embd.weight'")
    return file.tensors["token_embd.weight"].shape[0]
