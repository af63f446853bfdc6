"""Qwen3, dense (Yang et al. 2025): each query and key head is normed before rotation; head size is its own number."""

from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.models.decoder import Attention, CausalLM, DecoderLayer, GatedMLP
from minivllm_plugin.models.layers import RMSNorm
from minivllm_plugin.parallel.context import SINGLE, ParallelContext

__all__ = ["Qwen3Attention", "Qwen3ForCausalLM"]


class Qwen3Attention(Attention):
    """Attention with a norm over ``head_dim``: one weight for all query heads, another for all key heads."""

    def __init__(self, config: ModelConfig, parallel: ParallelContext = SINGLE) -> None:
        super().__init__(config, parallel)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)


class Qwen3ForCausalLM(CausalLM):
    """Checkpoint class ``Qwen3ForCausalLM``."""

    def build_layer(self, config: ModelConfig) -> DecoderLayer:
        return DecoderLayer(config, Qwen3Attention(config, self.parallel), GatedMLP(config, self.parallel))
