"""Attention by flash-attn, where it is installed: version 3 on Hopper, version 2 elsewhere, over our own paged cache.

Owns no kernel and no other op. What it needs of a model stands in :func:`unsupported`, asked once when a model is loaded; what it
needs of the machine in :func:`unavailable`, which also computes one tiny pass: a package that was built for another card
or another torch fails there, and not in the middle of an answer. Either reason is what ``explain()`` shows.

The two packages differ in what they take (flash_attn/flash_attn_interface.py, hopper/flash_attn_interface.py and their
flash_api.cpp, github.com/Dao-AILab/flash-attention):

- version 2 (``flash_attn``): blocks of a multiple of 256 tokens; decode rows by ``flash_attn_with_kvcache``, anything else by
  ``flash_attn_varlen_func``, both with ``block_table``.
- version 3 (``flash_attn_interface``): blocks of any size, one function for both, with ``page_table``.

Both want int32 lengths and tables, fp16 or bf16, K and V of the queries' type and heads of at most 256 in multiples of 8
(version 2 would pad others, which copies the whole cache at each call). A row of length 0 gives zeros.
"""

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minivllm_kernels.metadata import AttentionGeometry, AttentionMetadata

__all__ = ["attention", "unavailable", "unsupported"]

AMPERE, HOPPER = 8, 9
MAX_HEAD_DIM = 256
HEAD_DIM_STEP = 8
BLOCK_STEP_OF_2 = 256
SCRATCH = "flash"


@dataclass(frozen=True, slots=True)
class _Package:
    """What is installed.

    Attributes:
        with_cache: ``flash_attn_with_kvcache``.
        varlen: ``flash_attn_varlen_func`` of version 2; None: version 3, whose ``with_cache`` does it all.
    """

    name: str
    with_cache: Callable[..., Any]
    varlen: Callable[..., Any] | None


@cache
def unavailable() -> str | None:
    """Why flash-attn cannot be used here, or None. Imports it and tries it out, once."""
    if not torch.cuda.is_available():
        return "no CUDA device is available to torch"
    major, minor = torch.cuda.get_device_capability()
    if major < AMPERE:
        return f"flash-attn needs a device of compute capability 8.0, this one has {major}.{minor}"
    package, reason = _package()
    return reason if package is None else _tried(package, _device())


def unsupported(op: str, geometry: AttentionGeometry) -> str | None:
    """Why attention of this geometry is beyond the flash-attn that is installed, or None."""
    package, reason = _package()
    if package is None:
        return reason
    if geometry.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype {_name(geometry.dtype)} is neither bfloat16 nor float16"
    if geometry.cache_dtype != geometry.dtype:
        return f"keys and values of {_name(geometry.cache_dtype)} are not of the queries' {_name(geometry.dtype)}"
    if geometry.head_dim > MAX_HEAD_DIM or geometry.head_dim % HEAD_DIM_STEP:
        return f"head_dim {geometry.head_dim} is no multiple of {HEAD_DIM_STEP} up to {MAX_HEAD_DIM}"
    if geometry.num_heads % geometry.num_kv_heads:
        return f"{geometry.num_heads} query heads do not share {geometry.num_kv_heads} KV heads evenly"
    if package.varlen is not None and geometry.block_size % BLOCK_STEP_OF_2:
        return f"block_size {geometry.block_size} is no multiple of {BLOCK_STEP_OF_2}, which flash-attn 2 needs ({package.name})"
    return None


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """See :func:`minivllm_kernels.attention`, for geometries that :func:`unsupported` has nothing against.

    Equal to the reference within the rounding of the dtype. A row may differ in its last bits with the company it has, since
    flash-attn splits long contexts by how many rows there are.

    Raises:
        RuntimeError: flash-attn is not installed; dispatch does not choose it then.
    """
    package, reason = _package()
    if package is None:
        raise RuntimeError(f"attention by flash-attn: {reason}")
    if q.shape[0] == 0:
        return torch.empty_like(q)
    lengths, tables = metadata.lengths, metadata.block_tables
    common = {"softmax_scale": scale, "causal": True}
    if metadata.seq_lens is None:
        # Captured: what is derived of the static tensors is derived in the graph, at each replay.
        return _decode(package, q, k_cache, v_cache, lengths, _int32(tables), common)
    tables, starts_of_keys = metadata.scratch.get(SCRATCH) or _derived(metadata)
    if metadata.max_query_len == 1:
        return _decode(package, q, k_cache, v_cache, lengths, tables, common)
    starts, longest = metadata.query_starts, metadata.max_query_len
    result: Tensor
    if package.varlen is None:
        result = package.with_cache(
            q, k_cache, v_cache, cache_seqlens=lengths, page_table=tables, cu_seqlens_q=starts, max_seqlen_q=longest, **common
        )
    else:
        result = package.varlen(
            q, k_cache, v_cache, starts, starts_of_keys, longest, metadata.max_seq_len, block_table=tables, **common
        )
    return result


def _decode(
    package: _Package, q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, tables: Tensor, common: dict[str, Any]
) -> Tensor:
    """One new token a sequence: ``[B, 1, H, D]`` for flash-attn."""
    table = {"page_table" if package.varlen is None else "block_table": tables}
    result: Tensor = package.with_cache(q.unsqueeze(1), k_cache, v_cache, cache_seqlens=lengths, **table, **common)
    return result.squeeze(1)


def _derived(metadata: AttentionMetadata) -> tuple[Tensor, Tensor]:
    """Tables in int32, and where each sequence's keys start as if they stood side by side ``[B + 1]``: once for all layers."""
    starts = F.pad(metadata.lengths.cumsum(0, dtype=torch.int32), (1, 0))
    derived = metadata.scratch[SCRATCH] = (_int32(metadata.block_tables), starts)
    return derived


def _int32(tables: Tensor) -> Tensor:
    return tables if tables.dtype == torch.int32 and tables.stride(-1) == 1 else tables.to(torch.int32).contiguous()


@cache
def _package() -> tuple[_Package | None, str]:
    """What to use on this device, or why there is nothing."""
    reasons = []
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == HOPPER:
        module, reason = _imported("flash_attn_interface")
        reason = reason or _lacks(module, "flash_attn_with_kvcache", "page_table", "cu_seqlens_q", "max_seqlen_q")
        if not reason:
            return _Package("flash_attn_interface", module.flash_attn_with_kvcache, None), ""
        reasons.append(reason)
    module, reason = _imported("flash_attn")
    reason = reason or _lacks(module, "flash_attn_with_kvcache", "block_table")
    reason = reason or _lacks(module, "flash_attn_varlen_func", "block_table")
    if not reason:
        name = f"flash_attn {getattr(module, '__version__', '')}".strip()
        return _Package(name, module.flash_attn_with_kvcache, module.flash_attn_varlen_func), ""
    return None, "; ".join([*reasons, reason])


def _imported(name: str) -> tuple[Any, str]:
    try:
        module: ModuleType = importlib.import_module(name)
    except Exception as error:  # built for another torch or without a driver, it may raise anything
        return None, f"{name} does not import ({type(error).__name__}: {error})"
    return module, ""


def _lacks(module: Any, function: str, *parameters: str) -> str:
    """What an old version cannot do, or nothing."""
    found = getattr(module, function, None)
    known = inspect.signature(found).parameters if found is not None else {}
    missing = [parameter for parameter in parameters if parameter not in known]
    if not missing:
        return ""
    version = getattr(module, "__version__", "of unknown version")
    return f"{function} of {module.__name__} {version} takes no {', '.join(missing)}; install a newer one"


def _tried(package: _Package, device: torch.device) -> str | None:
    """One row over one block: zero keys give the mean of the values."""
    q = torch.zeros(1, 1, 64, dtype=torch.float16, device=device)
    keys = torch.zeros(1, BLOCK_STEP_OF_2, 1, 64, dtype=torch.float16, device=device)
    length, table = (torch.full(shape, number, dtype=torch.int32, device=device) for shape, number in (((1,), 4), ((1, 1), 0)))
    try:
        result = _decode(package, q, keys, torch.ones_like(keys), length, table, {"softmax_scale": 1.0, "causal": True})
        fine = bool((result == 1).all())
    except Exception as error:  # no kernel for this card, a missing symbol: whatever it is, it is not usable
        return f"{package.name} does not run here ({type(error).__name__}: {error!s:.200})"
    return None if fine else f"{package.name} computes wrong numbers here"


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
