"""Tiny random decoders for the CPU kernels: the same weights as a torch module (the oracle) and as a packed decoder."""

import ctypes
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from minivllm_kernels import AttentionMetadata
from minivllm_kernels.cpu import ops
from minivllm_kernels.cpu.build import kernel_cache_directory
from minivllm_kernels.cpu.decoder import CpuDecoder, DecoderWeights
from minivllm_plugin.models import architecture_class
from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.models.decoder import CausalLM
from minivllm_plugin.models.layers import RotaryTable, parameter_sources
from minivllm_plugin.runner.cpu_weights import decoder_geometry, pack_module

__all__ = [
    "CACHE_KINDS",
    "DEFAULTS",
    "WEIGHT_AND_CACHE_KINDS",
    "WEIGHT_KINDS",
    "CpuDriver",
    "Request",
    "build_module",
    "driver_for",
    "make_cos_sin",
    "model_config",
    "need_cpu_kernels",
    "random_tokens",
    "torch_logits",
    "use_private_cache",
    "write_checkpoint",
]

CACHE_KINDS = ("float32", "bfloat16", "int8")
WEIGHT_KINDS = (*CACHE_KINDS, "int4", "bfloat16_dot")
WEIGHT_AND_CACHE_KINDS = [(weights, cache) for weights in WEIGHT_KINDS for cache in CACHE_KINDS]

# Small, and multiples of as little as the kernels allow.
DEFAULTS = {
    "vocab_size": 101,
    "hidden_size": 96,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def need_cpu_kernels() -> None:
    """Skip where there is no compiler (fail in CI). A compiler that cannot build our sources is a failure everywhere."""
    reason = ops.unavailable()
    if reason is None:
        return
    if "no C++ compiler" not in reason or os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)


def use_private_cache(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache that shares the compiled library with the user's, so that nothing is built again."""
    shared = kernel_cache_directory()
    place.mkdir(parents=True)
    (place / "kernels").symlink_to(shared)
    monkeypatch.setenv("MINIVLLM_CACHE", str(place))
    return place


def model_config(architecture: str = "Llama", **fields: Any) -> ModelConfig:
    """A tiny decoder; ``fields`` are those of a config.json."""
    return ModelConfig.from_hf({**DEFAULTS, "architectures": [f"{architecture}ForCausalLM"], **fields})


def build_module(config: ModelConfig, seed: int = 0) -> CausalLM:
    """Random float32 weights, scaled so that activations and logits stay of order 1 at every size."""
    generator = torch.Generator().manual_seed(seed)
    module = architecture_class(config.architecture)(config)
    for name, parameter in module.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            values = 0.3 * noise
        elif parameter.dim() == 1:  # a norm
            values = 1.0 + 0.2 * noise
        else:
            values = noise * (1.0 if "embed" in name and not config.tie_word_embeddings else parameter.shape[1] ** -0.5)
        nn.init.zeros_(parameter).add_(values)
    return module.eval()


def make_cos_sin(config: ModelConfig) -> Tensor:
    return RotaryTable(config.rope, config.head_dim, config.max_position_embeddings).cos_sin


@dataclass
class Request:
    """A sequence in the cache of a :class:`CpuDriver`."""

    table: list[int]
    length: int = 0


@dataclass
class CpuDriver:
    """A decoder whose cache starts as poison (NaN, or any bytes with NaN scales) and whose blocks are handed out shuffled."""

    config: ModelConfig
    weights: DecoderWeights
    cache_kind: str = "float32"
    block_size: int = 16
    num_blocks: int = 192
    threads: int = 2
    seed: int = 0
    library: ctypes.CDLL | None = None
    decoder: CpuDecoder = field(init=False)

    def __post_init__(self) -> None:
        self.decoder = CpuDecoder(
            decoder_geometry(self.config),
            self.weights,
            make_cos_sin(self.config),
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            cache_kind=self.cache_kind,
            threads=self.threads,
            library=self.library,
        )
        self._free = random.Random(self.seed).sample(range(self.num_blocks), self.num_blocks)
        self.poison()

    def poison(self) -> None:
        for part in (part for layer in self.decoder.pool.layers for part in layer if part is not None):
            if part.dtype == torch.int8:
                part.random_(-128, 128, generator=torch.Generator().manual_seed(self.seed))
            else:
                part.fill_(torch.nan)

    def request(self, num_tokens: int, table: Sequence[int] | None = None) -> Request:
        """Blocks for a sequence of this many tokens."""
        count = -(-num_tokens // self.block_size)
        return Request(list(table) if table is not None else [self._free.pop() for _ in range(count)])

    def release(self, request: Request) -> None:
        self._free.extend(request.table)

    def step(self, *work: tuple[Request, Sequence[int]], rows: str = "all") -> list[Tensor]:
        """One batch: new tokens of each request; logits ``[new, vocab]`` of each (its last row only with ``rows="last"``)."""
        tokens = [token for _, new in work for token in new]
        counts = [len(new) for _, new in work]
        for request, new in work:
            request.length += len(new)
        ends = [sum(counts[: i + 1]) for i in range(len(counts))]
        last_rows = list(range(len(tokens))) if rows == "all" else [end - 1 for end in ends]
        logits = self.decoder.forward(
            tokens, counts, [request.length for request, _ in work], [request.table for request, _ in work], last_rows
        )
        return list(torch.split(logits, counts if rows == "all" else [1] * len(counts)))

    def run(self, tokens: Sequence[int], chunks: Sequence[int] | None = None) -> Tensor:
        """Logits of every token of one sequence, alone, fed in chunks of these sizes; its blocks are given back."""
        request, start, out = self.request(len(tokens)), 0, []
        for size in chunks or [len(tokens)]:
            out += self.step((request, tokens[start : start + size]))
            start += size
        assert start == len(tokens)
        self.release(request)
        return torch.cat(out)


def driver_for(module: CausalLM, kind: str = "float32", **options: Any) -> CpuDriver:
    """Pack a module and build a decoder on it."""
    return CpuDriver(module.config, pack_module(module, kind), **options)


@torch.inference_mode()
def torch_logits(module: CausalLM, tokens: Sequence[int]) -> Tensor:
    """The reference: logits ``[len(tokens), vocab]`` of one sequence by the torch module, in one block."""
    config = module.config
    shape = (1, len(tokens), config.num_kv_heads, config.head_dim)
    caches = [(torch.empty(shape), torch.empty(shape)) for _ in range(config.num_layers)]
    metadata = AttentionMetadata.build([len(tokens)], [len(tokens)], [[0]], len(tokens))
    hidden = module(torch.tensor(list(tokens)), torch.arange(len(tokens)), caches, metadata)
    return module.compute_logits(hidden)


def write_checkpoint(module: CausalLM, directory: Path, *, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    """A directory as Hugging Face saves it, without a tokenizer; ``fields`` are added to config.json."""
    tensors: dict[str, Tensor] = {}
    for source in parameter_sources(module):
        values = source.parameter.detach().to(dtype)
        if not source.parts:
            tensors[source.tensor] = values.contiguous()
            continue
        pieces = torch.split(values, [part.shape[0] for part in source.parts])
        tensors.update({part.tensor: piece.clone() for part, piece in zip(source.parts, pieces, strict=True)})
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    config = module.config
    content = {
        "architectures": [config.architecture],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.output_bias,
        "mlp_bias": config.mlp_bias,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    (directory / "config.json").write_text(json.dumps({**content, **fields}))
    return directory


def random_tokens(count: int, config: ModelConfig, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(config.vocab_size) for _ in range(count)]
