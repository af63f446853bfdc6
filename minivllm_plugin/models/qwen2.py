"""Qwen2 and Qwen2.5 (Yang et al. 2024): Llama's shape with a bias on query, key and value and on nothing else."""

from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.models.decoder import Attention, CausalLM, DecoderLayer, GatedMLP

__all__ = ["Qwen2ForCausalLM"]


class Qwen2ForCausalLM(CausalLM):
    """Checkpoint class ``Qwen2ForCausalLM``. The bias is fixed in the architecture; ``ModelConfig`` carries it."""

    def build_layer(self, config: ModelConfig) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, self.parallel), GatedMLP(config, self.parallel))
