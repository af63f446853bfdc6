"""Published model shapes written as ``config.json`` fields, one function per family. Facts only; builds no tensor.

The fields a family shares (vocabulary, norms, biases) stand in its function; what differs between its sizes is an argument.
"""

from collections.abc import Mapping
from typing import Any

__all__ = ["llama3_2", "num_parameters", "qwen2", "qwen3", "smollm2"]

QWEN_VOCABULARY = 151936
QWEN_BOS, QWEN_EOS = 151643, 151645  # <|endoftext|> and <|im_end|>


def smollm2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, theta: float = 1e5) -> dict[str, Any]:
    """SmolLM2 instruct family: a Llama with plain rope and a vocabulary of 49152."""
    return {
        **_llama(hidden, intermediate, layers, heads, kv_heads),
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "rope_theta": theta,
        "rope_scaling": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def llama3_2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Llama 3.2 text models: rope scaled from 8192 to 131072 positions."""
    return {
        **_llama(hidden, intermediate, layers, heads, kv_heads),
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 5e5,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "bos_token_id": 128000,
        "eos_token_id": [128001, 128008, 128009],
    }


def qwen3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, *, tied: bool = True) -> dict[str, Any]:
    """Qwen3 dense family: head size 128 whatever the hidden size, q/k norms, no biases."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": QWEN_VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "attention_bias": False,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "bos_token_id": QWEN_BOS,
        "eos_token_id": QWEN_EOS,
        "torch_dtype": "bfloat16",
    }


def qwen2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """Qwen2.5 small instruct models: biases on q, k and v only, tied embeddings."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": QWEN_VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "rope_theta": 1e6,
        "rope_scaling": None,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": QWEN_BOS,
        "eos_token_id": QWEN_EOS,
        "torch_dtype": "bfloat16",
    }


def num_parameters(architecture: Mapping[str, Any]) -> int:
    """Weights of a model of this shape: embeddings (once when tied), projections, biases and norms."""
    hidden, layers = architecture["hidden_size"], architecture["num_hidden_layers"]
    heads, kv_heads = architecture["num_attention_heads"], architecture["num_key_value_heads"]
    head_dim = architecture.get("head_dim") or hidden // heads
    query, key_value = heads * head_dim, kv_heads * head_dim
    attention = hidden * (query + 2 * key_value) + query * hidden
    if architecture["model_type"] == "qwen2":
        attention += query + 2 * key_value  # biases
    if architecture["model_type"] == "qwen3":
        attention += 2 * head_dim  # q and k norms
    mlp = 3 * hidden * architecture["intermediate_size"]
    embeddings = architecture["vocab_size"] * hidden * (1 if architecture["tie_word_embeddings"] else 2)
    return int(embeddings + layers * (attention + mlp + 2 * hidden) + hidden)


def _llama(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> dict[str, Any]:
    """What the small Llamas share: no biases, tied embeddings, head size ``hidden / heads``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
