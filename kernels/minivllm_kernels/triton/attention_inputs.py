"""One call of the attention op, checked: what both kernels are launched with. Looks at shapes, strides and dtypes, never at
values.

Layouts: ``q [T, H, D]`` with contiguous heads and any stride between heads and between rows, so that it may be a view of the
merged projection; caches ``[num_blocks, block_size, K, D]`` of one dtype and with the same strides, the last of them 1.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minivllm_kernels.metadata import AttentionGeometry, AttentionMetadata
from minivllm_kernels.triton.kv_types import FLOAT8, as_stored, check_scale
from minivllm_kernels.triton.launch import FLOATS, check_floats, check_rows, next_power_of_2

__all__ = ["MAX_HEAD_DIM", "AttentionInputs", "unsupported"]

MAX_HEAD_DIM = 256
TABLES = "triton.block_tables"  # in the scratch of a pass
CPU_CAPABILITY = (8, 0)  # whose configurations the interpreter runs


@dataclass(frozen=True, slots=True)
class AttentionInputs:
    """Tensors and numbers of one launch.

    Attributes:
        keys, values: the caches as a kernel takes them: 8-bit floats as bytes, which ``kind`` says how to read.
        tables: the block tables in int32, which halves the registers of a lookup. No pool has 2 ** 31 blocks.
        score_scale: what a product of a query and a key as stored is multiplied by to be a power of two.
        v_scale: what the sum of values as stored is multiplied by.
        capability: of the card, major and minor.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    out: Tensor
    metadata: AttentionMetadata
    tables: Tensor
    kind: str
    score_scale: float
    v_scale: float
    capability: tuple[int, int]

    @classmethod
    def checked(
        cls,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        k_scale: float,
        v_scale: float,
    ) -> "AttentionInputs":
        """With room for the output.

        Raises:
            ValueError: a shape, stride, dtype or scale that the kernels cannot take.
        """
        op = "attention"
        check_floats(op, q=q)
        if q.dim() != 3 or k_cache.dim() != 4 or q.shape[2] != k_cache.shape[3] or k_cache.shape[1] != metadata.block_size:
            raise ValueError(
                f"{op}: q must be [T, H, D] and caches [blocks, {metadata.block_size}, K, D], the block size being that of the "
                f"metadata; got {list(q.shape)} and {list(k_cache.shape)}"
            )
        if k_cache.dtype != v_cache.dtype or k_cache.shape != v_cache.shape or k_cache.stride() != v_cache.stride():
            raise ValueError(
                f"{op}: both caches must have one shape, dtype and strides; got {list(k_cache.shape)} {k_cache.dtype} "
                f"{k_cache.stride()} and {list(v_cache.shape)} {v_cache.dtype} {v_cache.stride()}"
            )
        check_rows(op, q=q, k_cache=k_cache, block_tables=metadata.block_tables)
        if (reason := _unsupported_shape(q.shape[1], k_cache.shape[2], q.shape[2])) is not None:
            raise ValueError(f"{op}: {reason}")
        if not 0.0 < scale < math.inf:
            raise ValueError(f"{op}: scale={scale}; it must be positive and finite, as 1 / sqrt(head size) is")
        check_scale(op, "k_scale", k_scale)
        check_scale(op, "v_scale", v_scale)
        keys, kind = as_stored(op, k_cache)
        if kind == "plain" and (k_scale != 1.0 or v_scale != 1.0):
            raise ValueError(
                f"{op}: k_scale={k_scale}, v_scale={v_scale} for a cache of {k_cache.dtype}, which has none; give 1.0"
            )
        return cls(
            q=q,
            keys=keys,
            values=as_stored(op, v_cache)[0],
            out=torch.empty(q.shape, dtype=q.dtype, device=q.device),
            metadata=metadata,
            tables=_block_tables(metadata),
            kind=kind,
            score_scale=scale * k_scale * math.log2(math.e),
            v_scale=v_scale,
            capability=torch.cuda.get_device_capability(q.device) if q.is_cuda else CPU_CAPABILITY,
        )

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.q.shape[1] // self.keys.shape[2]

    @property
    def element_bits(self) -> int:
        return self.q.element_size() * 8

    @property
    def kv_bits(self) -> int:
        return self.keys.element_size() * 8

    def heads_a_program(self, most: int) -> int:
        """Heads of a group that one program serves: all, or equal parts where there are more than ``most``."""
        return -(-self.group // -(-self.group // most))

    def shape(self) -> str:
        """All that decides how fast a configuration is, in words: the key under which a choice is remembered."""
        return (
            f"{self.group} heads a KV head, head size {self.q.shape[2]}, {self.q.dtype}, cache {self.keys.dtype} {self.kind}, "
            f"blocks of {self.metadata.block_size}"
        )

    def strides(self) -> tuple[int, ...]:
        """Of q's rows and heads; of the caches' blocks, slots and heads; of the block tables' rows."""
        return (*self.q.stride()[:2], *self.keys.stride()[:3], self.tables.stride(0))

    def constants(self) -> dict[str, Any]:
        """The constexpr arguments that do not depend on a configuration."""
        return {
            "KV_HEADS": self.keys.shape[2],
            "GROUP": self.group,
            "HEAD_DIM": self.q.shape[2],
            "BLOCK_SIZE": self.metadata.block_size,
            "FORMAT": self.kind,
            "BLOCK_D": max(next_power_of_2(self.q.shape[2]), 16),
        }


def _block_tables(metadata: AttentionMetadata) -> Tensor:
    if metadata.block_tables.dtype == torch.int32:
        return metadata.block_tables
    tables: Tensor | None = metadata.scratch.get(TABLES)
    if tables is None:
        tables = metadata.scratch[TABLES] = metadata.block_tables.to(torch.int32)
    return tables


def unsupported(geometry: AttentionGeometry) -> str | None:
    """Why the kernels cannot attend in a model of this geometry, or None."""
    if geometry.dtype not in FLOATS:
        return f"queries of {geometry.dtype}, not float32, bfloat16 or float16"
    if geometry.cache_dtype not in FLOATS and geometry.cache_dtype not in FLOAT8:
        return f"a cache of {geometry.cache_dtype}, not float32, bfloat16, float16, float8_e4m3fn or float8_e5m2"
    return _unsupported_shape(geometry.num_heads, geometry.num_kv_heads, geometry.head_dim)


def _unsupported_shape(num_heads: int, num_kv_heads: int, head_dim: int) -> str | None:
    if head_dim > MAX_HEAD_DIM:
        return f"head size {head_dim}, more than {MAX_HEAD_DIM}"
    if num_heads % num_kv_heads:
        return f"{num_heads} query heads, which {num_kv_heads} KV heads cannot share evenly"
    return None
