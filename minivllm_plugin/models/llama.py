"""Llama (Touvron et al. 2023; Llama 3 with its rope scaling; SmolLM2, TinyLlama, …): the plain shape of the decoder."""

from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.models.decoder import Attention, CausalLM, DecoderLayer, GatedMLP

__all__ = ["LlamaForCausalLM"]


class LlamaForCausalLM(CausalLM):
    """Checkpoint class ``LlamaForCausalLM``. Biases and rope scaling follow its configuration."""

    def build_layer(self, config: ModelConfig) -> DecoderLayer:
        return DecoderLayer(config, Attention(config, self.parallel), GatedMLP(config, self.parallel))
