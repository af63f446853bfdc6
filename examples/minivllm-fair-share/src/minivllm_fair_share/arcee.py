"""Arcee (AFM), a model architecture that the engine does not have: a Llama whose MLP has no gate and squares its ReLU.

Built from the engine's own layers, so paged attention, chunked prefill and prefix sharing come with it. Checked against
transformers' ``ArceeForCausalLM`` in the tests.
"""

import torch
from torch import Tensor, nn

from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.models.decoder import Attention, CausalLM, DecoderLayer
from minivllm_plugin.models.layers import Linear

__all__ = ["ArceeForCausalLM", "SquaredReLUMLP"]


class SquaredReLUMLP(nn.Module):
    """``down(relu(up(x))²)``: ``[T, C] -> [T, C]``. Attributes have the names that the checkpoint's tensors have."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(torch.relu(self.up_proj(x)).square())
        return out


class ArceeForCausalLM(CausalLM):
    """Checkpoint class ``ArceeForCausalLM``."""

    def build_layer(self, config: ModelConfig) -> DecoderLayer:
        return DecoderLayer(config, Attention(config), SquaredReLUMLP(config))
