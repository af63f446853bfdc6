"""The memory of a compiled decoder's KV blocks: one pool for all layers, in large pages where the system has them.

A block of all layers lies together, ``[num_blocks, layer, keys or values, KV head x slot, head_dim]``: what is in use fills few
pages. Its inner layouts are the library's own (``src/attention.h``). One caller at a time.
"""

import ctypes

import torch
from torch import Tensor

from minivllm_kernels.cpu.packing import DTYPES

__all__ = ["BYTES_AHEAD", "FIRST_BYTES", "CachePart", "KVPool"]

FIRST_BYTES = 64 << 20
BYTES_AHEAD = 24 << 20
PAGE = 4096  # bytes; of larger ones several touches are wasted, and cost nothing

CachePart = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""Keys, values and, for int8, their scales of one layer."""


class KVPool:
    """Blocks that nobody has written yet.

    Args:
        num_rows: of one block, for keys or values of one layer: KV heads x slots.
        kind: ``float32``, ``bfloat16`` or ``int8`` (one scale per token and KV head).
        library: asks the system for large pages.

    Attributes:
        layers: the part of each layer.
        block_rows: rows of ``head_dim`` from one block of a layer to the next.
    """

    def __init__(self, num_layers: int, num_blocks: int, num_rows: int, head_dim: int, kind: str, library: ctypes.CDLL) -> None:
        shape = (num_blocks, num_layers, 2, num_rows)
        pool = torch.empty(*shape, head_dim, dtype=torch.int8 if kind == "int8" else DTYPES[kind])
        scales = torch.empty(shape) if kind == "int8" else None
        self.num_blocks = num_blocks
        self.block_rows = num_layers * 2 * num_rows
        self.layers: list[CachePart] = []
        for layer in range(num_layers):
            keys, values = pool[:, layer].unbind(1)
            key_scales, value_scales = (None, None) if scales is None else scales[:, layer].unbind(1)
            self.layers.append((keys, values, key_scales, value_scales))
        self._parts = [pool] if scales is None else [pool, scales]
        self._num_touched = 0  # leading blocks whose memory the system has given
        self._num_used = 0
        for part in self._parts:
            library.minivllm_large_pages(part.data_ptr(), part.nbytes)

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts)

    def note_used(self, num_blocks: int) -> None:
        """So many leading blocks, or fewer, have been written by now."""
        self._num_used = max(self._num_used, num_blocks)

    def touch_next_block(self) -> bool:
        """Have the system give memory to one more block that was never used; False if enough of them have theirs.

        Or a prompt that is the first in its blocks would wait for that, a tenth of its time. :data:`BYTES_AHEAD` beyond those in
        use have theirs, and the first :data:`FIRST_BYTES`.
        """
        self._num_touched = max(self._num_touched, self._num_used)
        block_bytes = self.num_bytes // self.num_blocks
        wanted = max(FIRST_BYTES, self._num_used * block_bytes + BYTES_AHEAD) // block_bytes
        if self._num_touched >= min(wanted, self.num_blocks):
            return False
        for part in self._parts:
            part[self._num_touched].view(-1)[:: PAGE // part.element_size()].zero_()
        self._num_touched += 1
        return True
