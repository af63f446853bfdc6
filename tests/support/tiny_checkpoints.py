"""Random models of two layers, made by transformers and written to a directory, for whole engines to load."""

from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["tiny_checkpoint"]

SHAPE = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


def tiny_checkpoint(directory: Path, family: str) -> tuple[Path, Any]:
    """A ``Llama`` or ``Qwen3`` with every parameter random: where it was saved, and transformers' model of it."""
    config = getattr(transformers, f"{family}Config")(**SHAPE)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_((1.0 if "norm" in name else 0.0) + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(directory)
    return directory, model
