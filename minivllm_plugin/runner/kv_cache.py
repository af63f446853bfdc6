"""The K/V tensors of all layers, and how many blocks of them there are. Owns no accounting: that is the BlockManager's."""

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.models.config import ModelConfig

__all__ = ["CACHE_DTYPES", "KVCache", "block_bytes", "plan_num_blocks"]

CACHE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}

DEFAULT_BYTES = 2**30
DEFAULT_SHARE = 8
DEFAULT_TOKENS = 16384  # or twice the window: enough for some thirty chats, and a small model does not fill the memory


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values of every layer, each ``[num_blocks, block_size, num_kv_heads, head_dim]``.

    The memory is not initialised: an operating system that gives pages on first touch spends nothing on unused blocks, and
    kernels never read a slot that was not written.
    """

    layers: tuple[tuple[Tensor, Tensor], ...]
    num_blocks: int
    block_size: int

    @classmethod
    def allocate(
        cls, config: ModelConfig, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> "KVCache":
        shape = (num_blocks, block_size, config.num_kv_heads, config.head_dim)

        def pool() -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        return cls(tuple((pool(), pool()) for _ in range(config.num_layers)), num_blocks, block_size)

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for pair in self.layers for tensor in pair)


def block_bytes(config: ModelConfig, block_size: int, kind: str) -> int:
    """Bytes of one block, keys and values of all layers, in ``kind``: one of ``CACHE_DTYPES``, or int8 (with scales)."""
    head_bytes = config.head_dim + 4 if kind == "int8" else config.head_dim * CACHE_DTYPES[kind].itemsize
    return 2 * config.num_layers * block_size * config.num_kv_heads * head_bytes


def plan_num_blocks(engine: EngineConfig, model: ModelConfig, kind: str, measured: int | None = None) -> int:
    """Blocks in the pool: as asked for; else as many as ``measured`` bytes hold and the engine could ever use at once; else,
    where nothing was measured, for twice the window, or 16,384 tokens, as far as the default memory goes.

    Raises:
        ConfigError: the memory holds no block, or ``max_model_len`` does not fit.
    """
    each = block_bytes(model, engine.block_size, kind)
    if engine.num_blocks is not None:
        num_blocks = engine.num_blocks
    else:
        budget = engine.kv_cache_bytes or measured or min(DEFAULT_BYTES, _machine_memory() // DEFAULT_SHARE)
        num_blocks = budget // each
        if num_blocks < 1 and engine.kv_cache_bytes is None and measured is not None:
            raise ConfigError(
                f"gpu_memory_utilization={engine.gpu_memory_utilization} leaves {measured} bytes for the KV pool, and one block "
                f"of {engine.block_size} tokens takes {each}; raise it, or lower block_size, max_num_batched_tokens or "
                "max_num_sequences"
            )
        if num_blocks < 1:
            raise ConfigError(
                f"kv_cache_bytes={budget} holds no block: one block of {engine.block_size} tokens takes {each} bytes; "
                "raise kv_cache_bytes, lower block_size or use a 16-bit dtype"
            )
        if engine.kv_cache_bytes is None:
            window = engine.max_model_len or model.max_position_embeddings
            useful = engine.max_num_sequences * -(-window // engine.block_size)
            if measured is None:
                useful = min(useful, -(-max(2 * window, DEFAULT_TOKENS) // engine.block_size))
            num_blocks = min(num_blocks, useful)
    if num_blocks * engine.block_size < 2:
        raise ConfigError(f"num_blocks={num_blocks} of block_size={engine.block_size} is a window of one token: raise num_blocks")
    if engine.max_model_len is not None and engine.max_model_len > num_blocks * engine.block_size:
        needed = -(-engine.max_model_len // engine.block_size)
        raise ConfigError(
            f"max_model_len={engine.max_model_len} needs {needed} blocks of {engine.block_size} tokens, the pool has "
            f"{num_blocks}; lower max_model_len to {num_blocks * engine.block_size} "
            f"or set kv_cache_bytes to at least {needed * each}"
        )
    return num_blocks


def _machine_memory() -> int:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):  # not a POSIX system
        return DEFAULT_BYTES * DEFAULT_SHARE
