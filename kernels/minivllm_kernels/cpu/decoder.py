"""A whole decoder on the CPU kernels: packed weights, cache, and one library call a step."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minivllm_kernels.cpu.library import Batch, Cache, Layer, Model, kernel_library
from minivllm_kernels.cpu.packing import KINDS, PackedMatrix

__all__ = ["CpuDecoder", "DecoderGeometry", "LayerWeights"]


@dataclass(frozen=True, slots=True)
class DecoderGeometry:
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    eps: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norms are float32; ``q_norm`` and ``k_norm`` None where the architecture has none."""

    qkv: PackedMatrix
    out: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


class CpuDecoder:
    def __init__(
        self,
        geometry: DecoderGeometry,
        layers: Sequence[LayerWeights],
        embedding: PackedMatrix,
        head: PackedMatrix,
        final_norm: Tensor,
        cos_sin: Tensor,
        *,
        num_blocks: int,
        block_size: int,
        cache_kind: str,
        threads: int,
    ) -> None:
        self._library = kernel_library()
        self._keep = (list(layers), embedding, head, final_norm, cos_sin)
        self._caches = [_allocate(geometry, num_blocks, block_size, cache_kind) for _ in layers]
        structs = (Layer * len(layers))(*(_layer(w, c) for w, c in zip(layers, self._caches, strict=True)))
        self._layers = structs
        model = Model(
            structs, embedding.struct(), head.struct(), final_norm.data_ptr(), cos_sin.data_ptr(), len(layers), geometry.hidden_size,
            geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.intermediate_size, block_size, KINDS[cache_kind],
            geometry.eps, threads,
        )
        self._vocab_size = geometry.vocab_size
        self._channels = head.channels
        self._handle = self._library.minivllm_decoder_new(ctypes.byref(model))

    def forward(self, token_ids, query_lens, seq_lens, block_tables, last_rows) -> Tensor:
        width = max(map(len, block_tables))
        tables = np.zeros((len(block_tables), width), dtype=np.int32)
        for row, table in zip(tables, block_tables, strict=True):
            row[: len(table)] = table
        ids = np.array(token_ids, dtype=np.int32)
        queries, lengths = np.array(query_lens, dtype=np.int32), np.array(seq_lens, dtype=np.int32)
        last = np.array(last_rows, dtype=np.int32)
        logits = torch.empty(len(last_rows), self._channels)
        batch = Batch(
            len(block_tables), len(ids), len(last_rows), width, ids.ctypes.data, queries.ctypes.data, lengths.ctypes.data,
            tables.ctypes.data, last.ctypes.data, logits.data_ptr(),
        )
        self._library.minivllm_decoder_run(self._handle, ctypes.byref(batch))
        return logits[:, : self._vocab_size]


def _allocate(g, num_blocks, block_size, kind):
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}[kind]
    size = num_blocks * g.num_kv_heads * block_size
    k, v = torch.empty(size * g.head_dim, dtype=dtype), torch.empty(size * g.head_dim, dtype=dtype)
    if kind != "int8":
        return k, v, None, None
    return k, v, torch.empty(size), torch.empty(size)


def _layer(w: LayerWeights, c) -> Layer:
    p = lambda t: t.data_ptr() if t is not None else None
    return Layer(w.qkv.struct(), w.out.struct(), w.gate_up.struct(), w.down.struct(), p(w.input_norm), p(w.post_norm), p(w.q_norm), p(w.k_norm), Cache(*(p(t) for t in c)))
