"""Building blocks of the decoders: parameters, and the :mod:`minivllm_kernels` op that uses each.

Every block says which checkpoint tensors fill its parameters (:func:`parameter_sources`), so that the loader can prove
that nothing was left out. Blocks know nothing of files, sequences or blocks of the cache.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minivllm_kernels import add_rms_norm, embedding, linear, rms_norm
from minivllm_plugin.models.rope import RopeConfig, inverse_frequencies

__all__ = ["Embedding", "Linear", "MergedLinear", "ParameterSource", "RMSNorm", "RotaryTable", "parameter_sources"]


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """One parameter and the checkpoint tensors that may fill it.

    Attributes:
        owner, attribute: where the parameter lives, ``getattr(owner, attribute)``.
        tensor: name of the tensor that fills it whole.
        parts: for a merged layer, the tensors stacked along dimension 0 instead, as (name, rows); else empty.
    """

    owner: nn.Module
    attribute: str
    tensor: str
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def parameter(self) -> nn.Parameter:
        parameter = getattr(self.owner, self.attribute)
        assert isinstance(parameter, nn.Parameter)
        return parameter


def parameter_sources(model: nn.Module) -> Iterator[ParameterSource]:
    """Every parameter of ``model`` once, under the names that Hugging Face checkpoints use."""
    for path, module in model.named_modules():
        sections = module.sections if isinstance(module, MergedLinear) else {}
        parent = path.rpartition(".")[0]
        for attribute, _ in module.named_parameters(recurse=False):
            parts = tuple((f"{parent}.{section}.{attribute}", rows) for section, rows in sections.items())
            yield ParameterSource(module, attribute, f"{path}.{attribute}".removeprefix("."), parts)


class Linear(nn.Module):
    """``x [T, in_features] -> [T, out_features]``."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = _parameter(out_features, in_features)
        self.bias = _parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class MergedLinear(Linear):
    """Several linear layers of one input as one matrix product: ``[T, in] -> [T, sum of rows]``, sections side by side.

    ``sections`` maps the name each section has in checkpoints to its rows, in order.
    """

    def __init__(self, in_features: int, sections: Mapping[str, int], *, bias: bool = False) -> None:
        super().__init__(in_features, sum(sections.values()), bias=bias)
        self.sections = dict(sections)


class Embedding(nn.Module):
    """``token_ids [T] -> [T, size]``."""

    def __init__(self, vocab_size: int, size: int) -> None:
        super().__init__()
        self.weight = _parameter(vocab_size, size)

    def forward(self, token_ids: Tensor) -> Tensor:
        return embedding(token_ids, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last dimension, alone or with the residual addition before it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _parameter(size)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """``(norm(x + residual), x + residual)``."""
        return add_rms_norm(x, residual, self.weight, self.eps)


class RotaryTable(nn.Module):
    """``cos_sin [max_positions, head_dim]`` float32: cosines in the first half, sines in the second. One for all layers."""

    cos_sin: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        super().__init__()
        # On the CPU whatever the default device: a model is built on "meta", and a table cannot be loaded afterwards.
        positions = torch.arange(max_positions, dtype=torch.float32, device="cpu")
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
        self.register_buffer("cos_sin", torch.cat((angles.cos(), angles.sin()), dim=-1), persistent=False)


def _parameter(*shape: int) -> nn.Parameter:
    """Uninitialised: the loader fills it. No gradients, ever."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)
