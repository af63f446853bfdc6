"""Tiny random checkpoints made by transformers, and a driver that runs our models through a shuffled, poisoned cache."""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from minivllm_kernels import AttentionMetadata
from minivllm_plugin.models.catalog import ModelSource
from minivllm_plugin.models.loader import LoadedModel, load_model

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 10000.0,
}
COMMON = {"vocab_size": 97, "num_hidden_layers": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2}

# Every way in which the architectures differ, and every shape that a transcription error could hide behind.
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, 4:1 heads, llama3 rope, untied": (
        "Llama",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "rms_norm_eps": 1e-5,
            "rope_parameters": LLAMA3_ROPE,
            "tie_word_embeddings": False,
        },
    ),
    "llama, 9:3 heads, tied": (
        "Llama",
        {
            "hidden_size": 36,
            "intermediate_size": 40,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 8,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    "llama, all biases, linear rope": (
        "Llama",
        {
            "hidden_size": 24,
            "intermediate_size": 56,
            "num_attention_heads": 3,
            "num_key_value_heads": 3,
            "head_dim": 10,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5000.0},
            "tie_word_embeddings": False,
        },
    ),
    "qwen2, 6:2 heads, tied": (
        "Qwen2",
        {
            "hidden_size": 48,
            "intermediate_size": 64,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3, heads wider than hidden, untied": (
        "Qwen3",
        {
            "hidden_size": 40,
            "intermediate_size": 56,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
    ),
    "qwen3, attention bias, eps 1e-5, tied": (
        "Qwen3",
        {
            "hidden_size": 64,
            "intermediate_size": 56,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 8,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
    ),
}


def reference_model(family: str, fields: dict[str, Any], seed: int = 0) -> Any:
    """transformers' model of this shape, every parameter random: norms and biases too, each distinct."""
    config = getattr(transformers, f"{family}Config")(**(COMMON | fields))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            centre = 1.0 if "norm" in name else 0.0
            # 0.2 makes logits of order 1, so that an absolute tolerance of 1e-4 means something.
            parameter.copy_(centre + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model


class Driver:
    """Runs one of our models over a paged cache whose blocks are shuffled and whose unwritten slots are NaN."""

    def __init__(self, loaded: LoadedModel, *, num_blocks: int = 64, block_size: int = 4, seed: int = 0) -> None:
        config = loaded.cache_config
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)
        self.module, self.block_size = loaded.module, block_size
        self.caches = [
            (torch.full(shape, torch.nan, dtype=loaded.dtype), torch.full(shape, torch.nan, dtype=loaded.dtype))
            for _ in range(config.num_layers)
        ]
        self.free = random.Random(seed).sample(range(num_blocks), num_blocks)

    def table(self, num_tokens: int) -> list[int]:
        """Fresh blocks for a sequence of this length."""
        return [self.free.pop() for _ in range(-(-num_tokens // self.block_size))]

    @torch.inference_mode()
    def step(self, new_tokens: Sequence[Sequence[int]], starts: Sequence[int], tables: Sequence[Sequence[int]]) -> list[Tensor]:
        """Logits ``[new, vocab]`` of every new token of each sequence, computed in one batch."""
        lengths = [len(tokens) for tokens in new_tokens]
        totals = [start + length for start, length in zip(starts, lengths, strict=True)]
        metadata = AttentionMetadata.build(lengths, totals, tables, self.block_size)
        ids = torch.tensor([token for tokens in new_tokens for token in tokens])
        positions = torch.tensor([p for start, total in zip(starts, totals, strict=True) for p in range(start, total)])
        hidden = self.module(ids, positions, self.caches, metadata)
        return list(self.module.compute_logits(hidden).split(lengths))

    def run(self, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """Logits of all tokens of one sequence, fed in chunks of these sizes."""
        table, start, out = self.table(len(tokens)), 0, []
        for size in chunks:
            out += self.step([tokens[start : start + size]], [start], [table])
            start += size
        assert start == len(tokens)
        return torch.cat(out)


def load_directory(directory: Path, **options: Any) -> LoadedModel:
    """Our model from a directory or a GGUF file."""
    return load_model(
        ModelSource(str(directory), "gguf" if directory.suffix == ".gguf" else "directory", str(directory)), **options
    )


def edit_config(directory: Path, **fields: Any) -> None:
    """Set fields of a saved config.json."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def reference_logits(reference: Any, tokens: Sequence[int]) -> Tensor:
    """transformers' logits ``[len(tokens), vocab]`` of one sequence."""
    with torch.inference_mode():
        logits: Tensor = reference(torch.tensor([list(tokens)])).logits[0]
    return logits


PLAIN_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
SOME_TOKENS = [5, 9, 11, 3, 60]


def rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None], name: str = "model.safetensors") -> None:
    """Change the tensors of one file."""
    tensors = load_file(directory / name)
    change(tensors)
    save_file(tensors, directory / name, metadata={"format": "pt"})


def is_right(directory: Path, reference: Any) -> bool:
    """Whether what the directory holds computes what the reference does."""
    logits = Driver(load_directory(directory)).run(SOME_TOKENS, [len(SOME_TOKENS)])
    return torch.allclose(logits, reference_logits(reference, SOME_TOKENS), atol=1e-4)
