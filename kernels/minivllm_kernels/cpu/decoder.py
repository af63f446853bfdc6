"""A whole decoder on the compiled kernels: packed weights, a paged cache, and one library call a step.

The arithmetic and the layouts are described in ``src/``. Results of a sequence are the same bits alone, in any batch, chunked,
and after any history of the cache.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from minivllm_kernels.cpu.kv_pool import CachePart, KVPool
from minivllm_kernels.cpu.library import Batch, Cache, Layer, Model, kernel_library
from minivllm_kernels.cpu.packing import DTYPES, KINDS, PackedMatrix, padded_shape

__all__ = ["PIECES", "CpuDecoder", "DecoderGeometry", "DecoderWeights", "LayerWeights", "check_weights", "unsupported"]

PIECES = ("embed", "norms", "qkv", "rotary", "attention", "out", "gate_up", "down", "rounding", "head")
"""What a step consists of; ``rounding`` makes bytes or bfloat16 of the MLP's results. As in ``decoder.h``."""


@dataclass(frozen=True, slots=True)
class DecoderGeometry:
    """Sizes of a Llama-like decoder; ``eps`` is that of all its norms."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    eps: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. ``gate_up`` is interleaved; norms are float32; ``q_norm`` and ``k_norm`` None where there are none."""

    qkv: PackedMatrix
    out: PackedMatrix
    gate_up: PackedMatrix
    down: PackedMatrix
    input_norm: Tensor
    post_norm: Tensor
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder. ``embedding`` and ``head`` are one object where they are tied."""

    layers: tuple[LayerWeights, ...]
    embedding: PackedMatrix
    head: PackedMatrix
    final_norm: Tensor


def unsupported(geometry: DecoderGeometry, block_size: int, cache_kind: str) -> str | None:
    """Why these kernels cannot run this shape, or None."""
    for name, value, multiple in (
        ("hidden_size", geometry.hidden_size, 32),
        ("intermediate_size", geometry.intermediate_size, 16),
        ("head_dim", geometry.head_dim, 16),
    ):
        if value % multiple:
            return f"{name}={value} is not a multiple of {multiple}"
    if geometry.head_dim > 256:
        return f"head_dim={geometry.head_dim} is greater than 256"
    if cache_kind == "int8" and block_size % 16:
        return f"an int8 cache needs a block size that is a multiple of 16, got {block_size}"
    return None


def check_weights(geometry: DecoderGeometry, weights: DecoderWeights) -> None:
    """Refuse weights that are not of this shape: the library would read beyond them.

    Raises:
        ValueError: naming the matrix or norm, its shape and what is wanted.
    """
    wide, kv = geometry.num_heads * geometry.head_dim, geometry.num_kv_heads * geometry.head_dim
    hidden, inner, vocabulary = geometry.hidden_size, geometry.intermediate_size, geometry.vocab_size
    shapes = {"qkv": (wide + 2 * kv, hidden), "out": (hidden, wide), "gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    norms = {"input_norm": hidden, "post_norm": hidden, "q_norm": geometry.head_dim, "k_norm": geometry.head_dim}
    if weights.embedding.kind == "int4":
        raise ValueError("the embedding is int4, in which rows cannot be looked up; pack it as another kind")
    for name in ("embedding", "head"):
        _check_matrix(name, getattr(weights, name), vocabulary, hidden)
    _check_norm("final_norm", weights.final_norm, hidden)
    for index, layer in enumerate(weights.layers):
        for name, (channels, depth) in shapes.items():
            _check_matrix(f"{name} of layer {index}", getattr(layer, name), channels, depth)
        for name, size in norms.items():
            _check_norm(f"{name} of layer {index}", getattr(layer, name), size)
        if (layer.q_norm is None) != (layer.k_norm is None):
            raise ValueError(f"layer {index} has one of q_norm and k_norm; both or neither are wanted")


def _check_matrix(name: str, matrix: PackedMatrix, channels: int, depth: int) -> None:
    wide, deep = padded_shape(matrix.kind, channels, depth)
    numbers = wide * deep * 5 // 8 if matrix.kind == "int4" else wide * deep
    fits = (
        (matrix.channels, matrix.depth, matrix.data.numel()) == (wide, deep, numbers)
        and matrix.data.dtype == DTYPES[matrix.kind]
        and (matrix.scale is not None) == (matrix.kind == "int8")
        and all((part.shape, part.dtype) == ((wide,), torch.float32) for part in (matrix.scale, matrix.bias) if part is not None)
    )
    if not fits:
        raise ValueError(f"{name} is {matrix.kind} {list(matrix.data.shape)}, which is not {channels} x {depth} packed")


def _check_norm(name: str, norm: Tensor | None, size: int) -> None:
    if norm is not None and (norm.shape != (size,) or norm.dtype != torch.float32):
        raise ValueError(f"{name} is {norm.dtype} {list(norm.shape)}; float32 [{size}] is wanted")


class CpuDecoder:
    """Weights and cache, ready to run. One caller at a time.

    Args:
        cos_sin: float32 ``[positions, head_dim]``, cosines then sines.
        num_blocks, block_size: of the cache; its memory is not touched before it is used.
        cache_kind: ``float32``, ``bfloat16`` or ``int8`` (one scale per token and KV head).
        threads: of the process-wide pool, the caller included.
        library: None takes the one for this machine; each library has a pool of its own.
    """

    def __init__(
        self,
        geometry: DecoderGeometry,
        weights: DecoderWeights,
        cos_sin: Tensor,
        *,
        num_blocks: int,
        block_size: int,
        cache_kind: str,
        threads: int,
        library: ctypes.CDLL | None = None,
    ) -> None:
        reason = unsupported(geometry, block_size, cache_kind)
        if reason is not None:
            raise ValueError(reason)
        check_weights(geometry, weights)
        self.geometry = geometry
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._library = library or kernel_library()
        rows = geometry.num_kv_heads * block_size
        self.pool = KVPool(len(weights.layers), num_blocks, rows, geometry.head_dim, cache_kind)
        layers = (Layer * len(weights.layers))(*map(_layer_struct, weights.layers, self.pool.layers))
        self._kept = (weights, cos_sin, layers)  # the library holds addresses into these
        model = Model(
            layers=layers,
            embedding=weights.embedding.struct(),
            head=weights.head.struct(),
            final_norm=weights.final_norm.data_ptr(),
            cos_sin=cos_sin.data_ptr(),
            num_layers=len(weights.layers),
            hidden=geometry.hidden_size,
            heads=geometry.num_heads,
            kv_heads=geometry.num_kv_heads,
            head_dim=geometry.head_dim,
            intermediate=geometry.intermediate_size,
            block_size=block_size,
            cache_kind=KINDS[cache_kind],
            eps=geometry.eps,
            threads=threads,
            block_rows=self.pool.block_rows,
        )
        self._head_channels = weights.head.channels
        self._handle: int | None = self._library.minivllm_decoder_new(ctypes.byref(model))
        if not self._handle:
            raise MemoryError(f"no memory for the scratch of {threads} threads of the CPU kernels")

    def forward(
        self,
        token_ids: Sequence[int],
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        last_rows: Sequence[int],
        pooled_rows: Sequence[int] = (),
        pooled_states: Tensor | None = None,
    ) -> Tensor:
        """Compute T new tokens of B sequences, side by side, and store their keys and values.

        Args:
            token_ids: T ids.
            query_lens, seq_lens: of each sequence, its new tokens and its length once they are there.
            block_tables: of each sequence, the blocks of all its tokens in order.
            last_rows: the S rows (indices into T) that need logits.
            pooled_rows: the P rows whose hidden states are wanted.
            pooled_states: float32 ``[P, hidden_size]``, filled with them, after the last norm.

        Returns:
            float32 ``[S, vocab_size]``, a view with padded rows.

        Raises:
            MemoryError: no memory for the activations of T tokens; a smaller step may still fit.
            RuntimeError: the system starts no more threads.
        """
        ids = np.array(token_ids, dtype=np.int32)
        queries, lengths = np.array(query_lens, dtype=np.int32), np.array(seq_lens, dtype=np.int32)
        width = max(map(len, block_tables))
        tables = np.zeros((len(block_tables), width), dtype=np.int32)
        for row, table in zip(tables, block_tables, strict=True):
            row[: len(table)] = table
        rows = np.array(last_rows, dtype=np.int32)
        logits = torch.empty(len(last_rows), self._head_channels)
        pooled = np.array(pooled_rows, dtype=np.int32)
        if len(pooled) and (
            pooled_states is None
            or pooled_states.shape != (len(pooled), self.geometry.hidden_size)
            or pooled_states.dtype != torch.float32
            or not pooled_states.is_contiguous()
        ):
            raise ValueError(f"pooled_states must be contiguous float32 [{len(pooled)}, {self.geometry.hidden_size}]")
        batch = Batch(
            sequences=len(block_tables),
            tokens=len(ids),
            sampled=len(rows),
            table_width=width,
            token_ids=ids.ctypes.data,
            query_lens=queries.ctypes.data,
            seq_lens=lengths.ctypes.data,
            tables=tables.ctypes.data,
            last_rows=rows.ctypes.data,
            logits=logits.data_ptr(),
            pooled_rows=pooled.ctypes.data,
            pooled_states=None if pooled_states is None else pooled_states.data_ptr(),
            pooled=len(pooled),
        )
        failed = self._library.minivllm_decoder_run(self._handle, ctypes.byref(batch))
        if failed == 1:
            raise MemoryError(f"no memory for the activations of a step of {len(ids)} tokens")
        if failed:
            raise RuntimeError("the system starts no more threads for the CPU kernels; lower num_threads")
        return logits[:, : self.geometry.vocab_size]

    def seconds_of_pieces(self) -> dict[str, float]:
        """Where the time of all steps since the last call went, as one thread saw it: seconds by :data:`PIECES`."""
        seconds = (ctypes.c_double * len(PIECES))()
        self._library.minivllm_decoder_seconds(self._handle, seconds)
        return dict(zip(PIECES, seconds, strict=True))

    def __del__(self) -> None:
        handle = getattr(self, "_handle", None)
        if handle is not None:
            self._library.minivllm_decoder_free(handle)
            self._handle = None


def _layer_struct(weights: LayerWeights, cache: CachePart) -> Layer:
    return Layer(
        qkv=weights.qkv.struct(),
        out=weights.out.struct(),
        gate_up=weights.gate_up.struct(),
        down=weights.down.struct(),
        input_norm=_address(weights.input_norm),
        post_norm=_address(weights.post_norm),
        q_norm=_address(weights.q_norm),
        k_norm=_address(weights.k_norm),
        cache=Cache(*map(_address, cache)),
    )


def _address(tensor: Tensor | None) -> int | None:
    return tensor.data_ptr() if tensor is not None else None
