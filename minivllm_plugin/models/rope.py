"""Rotary position embedding: which kinds a checkpoint may ask for, and their inverse frequencies.

A kind that is not listed in :data:`KINDS` is refused by name: a wrong rotation runs and is simply wrong.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm_plugin.errors import ModelLoadError, UnsupportedModelError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["KINDS", "RopeConfig", "inverse_frequencies"]

# Kind -> the numbers it needs. "factors" is our own: GGUF stores llama3 scaling as one divisor per frequency.
KINDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "factors": ("factors",),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Base and scaling of the rotation.

    Attributes:
        theta: base of the geometric series of wavelengths.
        kind: a key of :data:`KINDS`.
        params: what the kind needs, in the order of :data:`KINDS`; for ``factors`` one divisor per pair of dimensions.
    """

    theta: float = 10000.0
    kind: str = "default"
    params: tuple[float, ...] = ()

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], *, head_dim: int, max_positions: int) -> "RopeConfig":
        """From ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (before)."""
        scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping) or any(isinstance(value, Mapping) for value in scaling.values()):
            raise UnsupportedModelError(f"rope parameters of this form are not supported: {scaling!r}")
        theta = _number(scaling.get("rope_theta", config.get("rope_theta", 10000.0)), "rope_theta")
        rotated = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        if rotated != 1.0:
            raise UnsupportedModelError(f"partial_rotary_factor={rotated!r} is not supported; only 1.0 is")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in KINDS:
            raise UnsupportedModelError(f"rope kind {kind!r} is not supported; supported are {', '.join(KINDS)}")
        if kind == "factors":
            return cls(theta, kind, _factors(scaling.get("factors"), head_dim // 2))
        fallback = {"original_max_position_embeddings": max_positions}
        params = {name: _number(scaling.get(name, fallback.get(name)), f"rope {name}") for name in KINDS[kind]}
        if kind == "llama3" and params["low_freq_factor"] >= params["high_freq_factor"]:
            raise ModelLoadError(f"rope low_freq_factor must be below high_freq_factor in config.json, got {dict(scaling)!r}")
        return cls(theta, kind, tuple(params.values()))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> "Tensor":
    """Angle per position of each pair of dimensions, float32 ``[head_dim / 2]`` on the CPU.

    Computed in float32, operation for operation as the models were trained and as transformers does: at long positions
    a more exact series would differ from the one the weights know.
    """
    import torch

    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64, device="cpu").float() / head_dim
    plain = 1.0 / (rope.theta**exponents)
    return _SCALINGS[rope.kind](plain, rope.params)


def _unscaled(plain: "Tensor", params: tuple[float, ...]) -> "Tensor":
    return plain


def _linear(plain: "Tensor", params: tuple[float, ...]) -> "Tensor":
    """Positions squeezed by one factor (Chen et al. 2023)."""
    return plain / params[0]


def _llama3(plain: "Tensor", params: tuple[float, ...]) -> "Tensor":
    """Long wavelengths are stretched, short ones kept, those between blended (Llama 3.1 model card)."""
    import torch

    factor, low, high, original = params
    turns = original / (2 * math.pi / plain)  # full turns within the original context
    blend = (turns - low) / (high - low)
    between = (1 - blend) * plain / factor + blend * plain
    return torch.where(turns < low, plain / factor, torch.where(turns > high, plain, between))


def _divided(plain: "Tensor", params: tuple[float, ...]) -> "Tensor":
    import torch

    return plain / torch.tensor(params, dtype=torch.float32, device="cpu")


_SCALINGS: dict[str, Callable[["Tensor", tuple[float, ...]], "Tensor"]] = {
    "default": _unscaled,
    "linear": _linear,
    "llama3": _llama3,
    "factors": _divided,
}


def _factors(value: Any, count: int) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != count:
        raise ModelLoadError(f"rope factors must be a list of {count} numbers (half of head_dim), got {value!r}")
    return tuple(_number(item, "rope factors") for item in value)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not (math.isfinite(value) and value > 0):
        raise ModelLoadError(f"{name} in config.json must be a positive number, got {value!r}")
    return float(value)
