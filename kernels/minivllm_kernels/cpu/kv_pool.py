"""The memory of a compiled decoder's KV blocks: one pool for all layers.

A block of all layers lies together, ``[num_blocks, layer, keys or values, KV head x slot, head_dim]``. Its inner layouts are the
library's own (``src/cache.h``). Not initialised: the system gives pages when they are first used.
"""

import torch
from torch import Tensor

from minivllm_kernels.cpu.packing import DTYPES

__all__ = ["CachePart", "KVPool"]

CachePart = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys, values and, for int8, their scales of one layer."""


class KVPool:
    """Blocks that nobody has written yet.

    Args:
        num_rows: of one block, for keys or values of one layer: KV heads x slots.
        kind: ``float32``, ``bfloat16`` or ``int8`` (one scale per token and KV head).

    Attributes:
        layers: the part of each layer.
        block_rows: rows of ``head_dim`` from one block of a layer to the next.
    """

    def __init__(self, num_layers: int, num_blocks: int, num_rows: int, head_dim: int, kind: str) -> None:
        shape = (num_blocks, num_layers, 2, num_rows)
        pool = torch.empty(*shape, head_dim, dtype=torch.int8 if kind == "int8" else DTYPES[kind])
        scales = torch.empty(shape) if kind == "int8" else None
        self.block_rows = num_layers * 2 * num_rows
        self.layers: list[CachePart] = []
        for layer in range(num_layers):
            keys, values = pool[:, layer].unbind(1)
            key_scales, value_scales = (None, None) if scales is None else scales[:, layer].unbind(1)
            self.layers.append((keys, values, key_scales, value_scales))
        self._parts = [pool] if scales is None else [pool, scales]

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)
