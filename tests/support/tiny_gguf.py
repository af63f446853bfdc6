"""Writes tiny GGUF files the way llama.cpp's converter lays them out, from transformers' models. An independent writer: it
shares no code with the reader under test, only the ``gguf`` package's container.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from tiny_models import reference_model
from torch import Tensor

NAMES = {
    "embed_tokens": "token_embd",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "norm": "output_norm",
}
TOKENS = ["<unk>", "<s>", "<|im_end|>", "<tool>", *"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab", "abc", "Ġa", "1", "2"]
MERGES = ["a b", "ab c", "Ġ a"]
TYPES = [2, 3, 3, 4, *([1] * (len(TOKENS) - 4))]

# The case of trials F01: 4 heads, 2 key heads, head size 4.
GROUPED = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}

Encoded = tuple[np.ndarray, GGMLQuantizationType]
"""Array and type; for quantised types the array holds the bytes of each row."""


def small(family: str = "Llama", **changes: Any) -> Any:
    """A random model of this case, some fields changed."""
    fields = GROUPED | changes
    if family == "Qwen2":
        fields.pop("head_dim")
    return reference_model(family, fields)


def leftovers(root: Path) -> list[str]:
    """Names of the files under the cache, locks aside."""
    return sorted(path.name for path in root.rglob("*") if path.is_file() and path.name != ".lock")


def plain(tensor: Tensor) -> Encoded:
    return tensor.float().numpy(), GGMLQuantizationType.F32


def converted_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """(GGUF name, values in GGUF order). Llama's q and k rows are reordered, with the key heads' own count for k."""
    config = model.config
    for name, tensor in model.state_dict().items():
        path, _, attribute = name.removeprefix("model.").rpartition(".")
        if path == "lm_head":
            if not config.tie_word_embeddings:
                yield f"output.{attribute}", tensor
            continue
        prefix = ""
        if path.startswith("layers."):
            _, layer, path = path.split(".", 2)
            prefix = f"blk.{layer}."
        if config.model_type == "llama" and path in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = config.num_attention_heads if path.endswith("q_proj") else config.num_key_value_heads
            size = tensor.shape[0] // heads // 2
            tensor = tensor.reshape(heads, 2, size, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        yield f"{prefix}{NAMES[path]}.{attribute}", tensor


def write_gguf(
    path: Path,
    model: Any,
    *,
    encode: Callable[[str, Tensor], Encoded] | None = None,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, Encoded] | None = None,
    leave_out: tuple[str, ...] = (),
) -> Path:
    """``model`` as a GGUF. ``metadata`` overrides keys (None removes one); ``encode(name, values)`` picks each type."""
    config = model.config
    arch = config.model_type
    rope = config.rope_parameters
    fields: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        f"{arch}.attention.key_length": config.head_dim if arch != "qwen2" else config.hidden_size // config.num_attention_heads,
        f"{arch}.rope.freq_base": rope["rope_theta"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": TYPES,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    } | dict(metadata or {})
    writer = GGUFWriter(path, fields.pop("general.architecture", arch))
    for key, value in fields.items():
        if value is not None:
            _add(writer, key, value)
    for name, tensor in converted_tensors(model):
        if name in leave_out:
            continue
        array, kind = (encode or (lambda _, values: plain(values)))(name, tensor)
        writer.add_tensor(name, np.ascontiguousarray(array), raw_dtype=kind)
    for name, (array, kind) in (extra or {}).items():
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama3_rope_factors(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """The divisors that llama.cpp's converter stores for llama3 scaling."""
    factors = []
    for i in range(0, head_dim, 2):
        wavelength = 2 * np.pi * rope["rope_theta"] ** (i / head_dim)
        original = rope["original_max_position_embeddings"]
        low, high = original / rope["low_freq_factor"], original / rope["high_freq_factor"]
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(rope["factor"])
        else:
            smooth = (original / wavelength - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return torch.tensor(factors)


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
