"""Building blocks of the decoders: parameters, and the :mod:`minivllm_kernels` op that uses each.

Every block says which parts of which checkpoint tensors fill its parameters (:func:`parameter_sources`), so that the loader
can prove that nothing was left out, and reads no more than the block keeps. Blocks know nothing of files, sequences or blocks
of the cache. Those of which a rank holds a part are in :mod:`minivllm_plugin.models.parallel_layers`.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from minivllm_kernels import add_rms_norm, linear, rms_norm
from minivllm_plugin.models.rope import RopeConfig, inverse_frequencies

__all__ = [
    "Cut",
    "Linear",
    "ParameterSource",
    "PartitionedLayer",
    "RMSNorm",
    "RotaryTable",
    "TensorSlice",
    "make_parameter",
    "parameter_sources",
]


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of one section of a layer's parameter is kept here.

    Attributes:
        size: entries of the whole section along ``dim``.
        start, stop: those that are kept.
        section: its name in checkpoints, in place of the layer's own; empty for a layer of one section.
        dim: 0, or 1 for a matrix that is split by columns.
    """

    size: int
    start: int
    stop: int
    section: str = ""
    dim: int = 0


class PartitionedLayer(nn.Module):
    """A layer that says what of a checkpoint fills its parameters; other modules take each tensor whole."""

    def cuts(self, attribute: str) -> tuple[Cut, ...]:
        """The sections of parameter ``attribute``, stacked along dimension 0 in this order. Rows beyond them are zeros."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """A part of one checkpoint tensor.

    Attributes:
        tensor: its name.
        shape: of the whole tensor.
        dim, start, stop: entries ``start`` to ``stop - 1`` along ``dim``, all of the other dimensions.
    """

    tensor: str
    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int

    @property
    def is_whole(self) -> bool:
        return not self.shape or self.stop - self.start == self.shape[self.dim]

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of the part."""
        return tuple(self.stop - self.start if dim == self.dim else size for dim, size in enumerate(self.shape))

    def of(self, whole: Tensor) -> Tensor:
        """The part of ``whole``, a view."""
        return whole if self.is_whole else whole.narrow(self.dim, self.start, self.stop - self.start)


@dataclass(frozen=True, slots=True)
class ParameterSource:
    """One parameter and the checkpoint tensors that may fill it.

    Attributes:
        owner, attribute: where the parameter lives, ``getattr(owner, attribute)``.
        tensor: name of the tensor that holds all of its sections.
        whole: the parts of that tensor, stacked along dimension 0.
        parts: for a merged layer, the parts of one tensor a section instead; else empty.
    """

    owner: nn.Module
    attribute: str
    tensor: str
    whole: tuple[TensorSlice, ...]
    parts: tuple[TensorSlice, ...] = ()

    @property
    def parameter(self) -> nn.Parameter:
        parameter = getattr(self.owner, self.attribute)
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def set(self, values: Tensor) -> None:
        """Replace the parameter."""
        setattr(self.owner, self.attribute, nn.Parameter(values, requires_grad=False))


def parameter_sources(model: nn.Module) -> Iterator[ParameterSource]:
    """Every parameter of ``model`` once, under the names that Hugging Face checkpoints use."""
    for path, module in model.named_modules():
        parent = path.rpartition(".")[0]
        for attribute, parameter in module.named_parameters(recurse=False):
            shape = tuple(parameter.shape)
            rows = shape[0] if shape else 1
            cuts = module.cuts(attribute) if isinstance(module, PartitionedLayer) else (Cut(rows, 0, rows),)
            tensor = f"{path}.{attribute}".removeprefix(".")
            stacked = _shape_of_whole(shape, cuts[0].dim, sum(cut.size for cut in cuts))
            whole, parts, before = [], [], 0
            for cut in cuts:
                whole.append(TensorSlice(tensor, stacked, cut.dim, before + cut.start, before + cut.stop))
                if cut.section:
                    name = f"{parent}.{cut.section}.{attribute}".removeprefix(".")
                    parts.append(TensorSlice(name, _shape_of_whole(shape, cut.dim, cut.size), cut.dim, cut.start, cut.stop))
                before += cut.size
            yield ParameterSource(module, attribute, tensor, tuple(whole), tuple(parts))


class Linear(nn.Module):
    """``x [T, in_features] -> [T, out_features]``, the whole of it on every rank."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = make_parameter(out_features, in_features)
        self.bias = make_parameter(out_features) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm of the last dimension, alone or with the residual addition before it."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = make_parameter(size)
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


def make_parameter(*shape: int) -> nn.Parameter:
    """Uninitialised: the loader fills it. No gradients, ever."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def _shape_of_whole(kept: tuple[int, ...], dim: int, size: int) -> tuple[int, ...]:
    return tuple(size if place == dim else entries for place, entries in enumerate(kept))
