"""Weights in the layouts of ``src/rows.h``: panels of 32 output channels, streamed once per product.

Kinds: ``float32`` and ``bfloat16`` keep their values, and activations stay floats; with ``bfloat16_dot`` activations are rounded
to bfloat16 too, which is what ``dtype="bfloat16"`` means elsewhere, and faster; ``int8`` takes one scale per output channel,
symmetric, nearest; ``int4`` a step and a least value per channel and 32 inputs, which keeps GGUF's Q4_1 weights as they are.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm_kernels.cpu.library import PANEL, Matrix, kernel_library

__all__ = ["KINDS", "PackedMatrix", "interleave_gate_up", "pack_matrix", "padded_shape"]

KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3, "bfloat16_dot": 4}
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.uint8,
    "int4": torch.uint8,
    "bfloat16_dot": torch.bfloat16,
}
LEAST_BFLOAT16 = 2.0**-56  # what is smaller is 0 among bfloat16_dot's factors; why stands in src/dot.h
GROUP4 = 32  # inputs that share a step and a least value


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """A matrix ready for the kernels.

    Attributes:
        kind: a key of :data:`KINDS`.
        data: float kinds ``[N/32, K, 32]``; bfloat16_dot ``[N/32, K/2, 32, 2]``; int8 ``[N/32, K/4, 32, 4]`` uint8, value + 128;
            int4 ``[N/32, K/32, 640]`` uint8, see ``src/int4.h``. N and K are padded with zeros.
        scale: float32 ``[N]``, int8 only.
        bias: float32 ``[N]`` or None.
    """

    kind: str
    data: Tensor
    scale: Tensor | None
    bias: Tensor | None

    @property
    def channels(self) -> int:
        return self.data.shape[0] * PANEL

    @property
    def depth(self) -> int:
        return self.data.shape[1] * {"int8": 4, "int4": GROUP4, "bfloat16_dot": 2}.get(self.kind, 1)

    def struct(self) -> Matrix:
        """For the library; valid while this object lives."""
        scale = self.scale.data_ptr() if self.scale is not None else None
        bias = self.bias.data_ptr() if self.bias is not None else None
        return Matrix(self.data.data_ptr(), scale, bias, KINDS[self.kind], self.channels, self.depth, 0)


def padded_shape(kind: str, channels: int, depth: int) -> tuple[int, int]:
    """What ``[channels, depth]`` is rounded up to."""
    multiple = {"int8": int(kernel_library().minivllm_group()), "int4": GROUP4, "bfloat16_dot": 32}.get(kind, 16)
    return -(-channels // PANEL) * PANEL, -(-depth // multiple) * multiple


def pack_matrix(weight: Tensor, kind: str, bias: Tensor | None = None) -> PackedMatrix:
    """Pack ``weight [N, K]`` (any float dtype)."""
    channels, depth = weight.shape
    full_channels, full_depth = padded_shape(kind, channels, depth)
    panels = full_channels // PANEL
    padded_bias = None
    if bias is not None:
        padded_bias = torch.zeros(panels * PANEL)
        padded_bias[:channels] = bias
    if kind == "int4":
        padded = torch.zeros(panels * PANEL, full_depth)
        padded[:channels, :depth] = weight
        return PackedMatrix(kind, _pack_int4(padded.view(panels, PANEL, full_depth // GROUP4, GROUP4)), None, padded_bias)
    if kind != "int8":
        data = torch.zeros(panels * PANEL, full_depth, dtype=DTYPES[kind])
        data[:channels, :depth] = weight
        if kind == "bfloat16_dot":
            data.masked_fill_(data.abs() < LEAST_BFLOAT16, 0.0)
            pairs = data.view(panels, PANEL, full_depth // 2, 2).transpose(1, 2).contiguous()
            return PackedMatrix(kind, pairs, None, padded_bias)
        return PackedMatrix(kind, data.view(panels, PANEL, full_depth).transpose(1, 2).contiguous(), None, padded_bias)
    wide = weight.float()
    scale = torch.zeros(panels * PANEL)
    scale[:channels] = wide.abs().amax(dim=1) / 127.0
    quantised = torch.full((panels * PANEL, full_depth), 128, dtype=torch.uint8)
    # A channel of nothing but zeros, or of so little that 1 / scale is infinite, becomes zeros; one with an infinity or a NaN
    # too, and its scale makes the result NaN.
    inverse = torch.where((scale > 1e-38) & (scale < torch.inf), 1.0 / scale, 0.0)[:channels]
    quantised[:channels, :depth] = _bytes(wide * inverse.unsqueeze(1))
    data = quantised.view(panels, PANEL, full_depth // 4, 4).transpose(1, 2).contiguous()
    return PackedMatrix(kind, data, scale, padded_bias)


def _pack_int4(weight: Tensor) -> Tensor:
    """``[panels, 32, groups, 32]`` -> ``[panels, groups, 640]`` bytes: steps, least values, nibbles."""
    least, most = weight.aminmax(dim=-1)
    # Kept as half floats: what is stored is what is computed with.
    step = ((most - least) / 15.0).half()
    least = least.half()
    inverse = torch.where(step > 0, 1.0 / step.float(), 0.0)
    nibbles = (
        ((weight - least.float().unsqueeze(-1)) * inverse.unsqueeze(-1)).nan_to_num_(0.0).round_().clamp_(0, 15).to(torch.uint8)
    )
    # [panels, half, 16, groups, pair, low/high, 4] -> [panels, groups, pair, half, 16, 4], low | high << 4
    panels, _, groups, _ = weight.shape
    split = nibbles.view(panels, 2, 16, groups, 4, 2, 4)
    joined = (split[:, :, :, :, :, 0] | split[:, :, :, :, :, 1] << 4).permute(0, 3, 4, 1, 2, 5).reshape(panels, groups, 512)
    scales = torch.stack((step, least), dim=-1).permute(0, 2, 3, 1).contiguous()  # [panels, groups, 2, 32]
    return torch.cat((scales.view(torch.uint8).view(panels, groups, 128), joined), dim=-1).contiguous()


def _bytes(values: Tensor) -> Tensor:
    return values.nan_to_num_(0.0).round_().clamp_(-127, 127).add_(128.0).to(torch.uint8)


def interleave_gate_up(stacked: Tensor) -> Tensor:
    """``[2 * I, …]``, gates then ups, -> 16 gates, 16 ups, 16 gates …: one panel holds pairs that are multiplied."""
    half = stacked.shape[0] // 2
    return stacked.view(2, half // 16, 16, *stacked.shape[1:]).transpose(0, 1).reshape(stacked.shape)
