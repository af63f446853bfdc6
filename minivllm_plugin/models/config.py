"""What a checkpoint says about itself, reduced to what our models compute, and refused by name where they cannot.

Reads Hugging Face's ``config.json`` (both spellings of rope and dtype: transformers 4 and 5). Knows no files, no torch.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from minivllm_plugin.errors import ModelLoadError, UnsupportedModelError
from minivllm_plugin.models import ARCHITECTURES
from minivllm_plugin.models.rope import RopeConfig

__all__ = ["ModelConfig", "architecture_of", "token_ids"]

DTYPES = ("float32", "bfloat16", "float16")
# Beyond these a config.json is taken to be corrupt: building what it says would take all memory.
MAX_LAYERS = 10_000
MAX_POSITIONS = 2**24
MAX_SIZE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and constants of one decoder.

    Attributes:
        architecture: a key of ``minivllm_plugin.models.ARCHITECTURES``, or one that a plugin added.
        head_dim: size of one head; ``num_heads * head_dim`` need not be ``hidden_size``.
        qkv_bias, output_bias, mlp_bias: which linear layers of a block have a bias.
        eos_token_ids: every token that ends a turn, in file order without repeats; empty when the files name none.
        dtype: the checkpoint's dtype, one of float32, bfloat16, float16.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, known: Collection[str] = ARCHITECTURES) -> "ModelConfig":
        """From the content of a ``config.json``.

        Args:
            known: architectures that somebody computes; ours, and those of plugins.

        Raises:
            UnsupportedModelError: architecture, rope kind, activation, sliding window or quantisation we do not compute.
            ModelLoadError: a field is missing or impossible; the message names it.
        """
        architecture = architecture_of(config, known)
        _refuse_unsupported(config)
        hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
        kv_heads = _integer(config, "num_key_value_heads", heads)
        if heads % kv_heads:
            raise ModelLoadError(
                f"num_attention_heads={heads} is not a multiple of num_key_value_heads={kv_heads} in config.json"
            )
        head_dim = _head_dim(config, architecture, hidden, heads)
        positions = _integer(config, "max_position_embeddings", limit=MAX_POSITIONS)
        qkv_bias, output_bias, mlp_bias = _biases(config, architecture)
        return cls(
            architecture=architecture,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden,
            num_layers=_integer(config, "num_hidden_layers", limit=MAX_LAYERS),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=_integer(config, "intermediate_size"),
            rms_norm_eps=_positive(config, "rms_norm_eps", 1e-6),
            max_position_embeddings=positions,
            rope=RopeConfig.from_hf(config, head_dim=head_dim, max_positions=positions),
            tie_word_embeddings=_flag(config, "tie_word_embeddings", False),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            eos_token_ids=token_ids(config.get("eos_token_id"), "eos_token_id"),
            bos_token_id=next(iter(token_ids(config.get("bos_token_id"), "bos_token_id")), None),
            dtype=_dtype(config),
        )


def architecture_of(config: Mapping[str, Any], known: Collection[str] = ARCHITECTURES) -> str:
    """The first of a ``config.json``'s ``architectures`` that is known.

    Raises:
        UnsupportedModelError: none is; the known ones are listed.
        ModelLoadError: the file names none.
    """
    names = config.get("architectures")
    if not isinstance(names, list | tuple) or not names or not all(isinstance(name, str) for name in names):
        raise ModelLoadError(f"config.json must name its class in 'architectures', got {names!r}")
    for name in names:
        if name in known:
            return str(name)
    raise UnsupportedModelError(f"architecture {names[0]!r} is not supported; supported are {', '.join(sorted(known))}")


def token_ids(value: Any, name: str) -> tuple[int, ...]:
    """A token id, a list of them or None, as a tuple without repeats. Raises ModelLoadError naming ``name``."""
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ModelLoadError(f"{name} must be a token id or a list of them, got {value!r}")
    return tuple(dict.fromkeys(values))


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        quantisation = config["quantization_config"]
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, Mapping) else quantisation
        raise UnsupportedModelError(
            f"quantised checkpoint (quantization_config.quant_method={method!r}) is not supported; "
            "use the unquantised checkpoint, a GGUF of it, or a plugin that reads this method"
        )
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise UnsupportedModelError(f"hidden_act={activation!r} is not supported; only 'silu' is")
    window = _sliding_window(config)
    if window is not None:
        raise UnsupportedModelError(f"sliding-window attention (window {window}) is not supported; only full attention is")


def _sliding_window(config: Mapping[str, Any]) -> Any:
    """The window if some layer really uses one shorter than the model's positions, else None."""
    layer_types = config.get("layer_types") or []
    odd = [kind for kind in layer_types if kind not in ("full_attention", "sliding_attention")]
    if odd:
        raise UnsupportedModelError(
            f"layer type {odd[0]!r} (layer_types in config.json) is not supported; only 'full_attention' is"
        )
    window = config.get("sliding_window")
    if "sliding_attention" in layer_types:
        used = True
    else:
        # Qwen: layers from max_window_layers on are windowed, and only when use_sliding_window says so.
        first = config.get("max_window_layers", 0)
        used = bool(config.get("use_sliding_window")) and isinstance(first, int) and first < config.get("num_hidden_layers", 0)
    return window if used and window is not None and window < config.get("max_position_embeddings", math.inf) else None


def _head_dim(config: Mapping[str, Any], architecture: str, hidden: int, heads: int) -> int:
    if config.get("head_dim") is None:
        if architecture == "Qwen3ForCausalLM":
            return 128  # the default of Qwen's own configuration class, whatever hidden_size / heads is
        if hidden % heads:
            raise ModelLoadError(f"config.json has no head_dim, and hidden_size={hidden} does not divide by {heads} heads")
    head_dim = _integer(config, "head_dim", hidden // heads)
    if head_dim % 2:
        raise ModelLoadError(f"head_dim={head_dim} must be even: rotary embedding turns pairs of dimensions")
    return head_dim


def _biases(config: Mapping[str, Any], architecture: str) -> tuple[bool, bool, bool]:
    """(q/k/v, attention output, MLP)."""
    if architecture == "Qwen2ForCausalLM":
        return True, False, False  # fixed in the architecture, config.json has no word for it
    attention = _flag(config, "attention_bias", False)
    return attention, attention, _flag(config, "mlp_bias", False)


def _dtype(config: Mapping[str, Any]) -> str:
    value = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedModelError(f"checkpoint dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
    return name


def _integer(config: Mapping[str, Any], name: str, default: int | None = None, *, limit: int = MAX_SIZE) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if value is None:
        raise ModelLoadError(f"config.json lacks {name!r}")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise ModelLoadError(f"{name} in config.json must be an integer from 1 to {limit}, got {value!r}")
    return value


def _positive(config: Mapping[str, Any], name: str, default: float) -> float:
    value = config.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ModelLoadError(f"{name} in config.json must be a positive number, got {value!r}")
    return float(value)


def _flag(config: Mapping[str, Any], name: str, default: bool) -> bool:
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise ModelLoadError(f"{name} in config.json must be true or false, got {value!r}")
    return value
