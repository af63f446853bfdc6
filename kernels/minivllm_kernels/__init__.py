"""The operations a decoder needs, one public function each, over interchangeable backends.

Callers import from here and never from a backend. :mod:`minivllm_kernels.dispatch` picks the backend of an op once per
device; ``explain()`` says which and why. Offsets are int64. Nothing here moves data between devices.

Shapes: ``T`` tokens of all sequences of a batch side by side, ``B`` sequences, ``H`` query heads, ``K`` key/value heads,
``D`` head size. KV caches are ``[num_blocks, block_size, K, D]``.
"""

from collections.abc import Sequence

from torch import Tensor

from minivllm_kernels.dispatch import explain, implementation
from minivllm_kernels.draws import DrawTensors, TokenDraw
from minivllm_kernels.metadata import AttentionGeometry, AttentionMetadata

__all__ = [
    "OPS",
    "AttentionGeometry",
    "AttentionMetadata",
    "DrawTensors",
    "TokenDraw",
    "add_rms_norm",
    "argmax",
    "attention",
    "embedding",
    "explain",
    "linear",
    "norm_rotary_store",
    "rms_norm",
    "rotary",
    "sample",
    "sample_rows",
    "silu_and_mul",
    "store_kv",
]

OPS = (
    "embedding",
    "linear",
    "rms_norm",
    "add_rms_norm",
    "rotary",
    "silu_and_mul",
    "store_kv",
    "norm_rotary_store",
    "attention",
    "argmax",
    "sample",
    "sample_rows",
)


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of ``weight [V, C]`` for ``token_ids [T]`` (int64) -> ``[T, C]``."""
    result: Tensor = implementation("embedding", weight.device.type)(token_ids, weight)
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [T, in] @ weight [out, in].T + bias [out]`` -> ``[T, out]``."""
    result: Tensor = implementation("linear", x.device.type)(x, weight, bias)
    return result


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension, computed in float32, result in ``x.dtype`` (Zhang & Sennrich 2019)."""
    result: Tensor = implementation("rms_norm", x.device.type)(x, weight, eps)
    return result


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``s = x + residual`` -> ``(rms_norm(s), s)``; both ``[T, C]``. The inputs are not written."""
    result: tuple[Tensor, Tensor] = implementation("add_rms_norm", x.device.type)(x, residual, weight, eps)
    return result


def rotary(q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate ``q [T, H, D]`` and ``k [T, K, D]`` by position, NeoX style: dimension i pairs with i + D/2 (Su et al. 2021).

    ``positions [T]`` int64; ``cos_sin [max_positions, D]`` float32 holds cos in its first half, sin in its second.
    """
    result: tuple[Tensor, Tensor] = implementation("rotary", q.device.type)(q, k, positions, cos_sin)
    return result


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``[T, 2 * I]`` -> ``silu(first half) * second half`` ``[T, I]`` (Shazeer 2020)."""
    result: Tensor = implementation("silu_and_mul", gate_up.device.type)(gate_up)
    return result


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor) -> None:
    """Write ``k, v [T, K, D]`` to slots ``slot_mapping [T]`` (int64, block * block_size + offset). Negative slots are skipped."""
    implementation("store_kv", k.device.type)(k, v, k_cache, v_cache, slot_mapping)


def norm_rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """What stands between the projections and attention, in one pass: per-head norm, rotation, store -> q ``[T, H, D]``.

    The same as :func:`rms_norm` of ``q [T, H, D]`` and ``k [T, K, D]`` over D with ``q_weight`` and ``k_weight [D]`` (both or
    neither), :func:`rotary` and :func:`store_kv`. A backend's own version is used where these three ops are its own as well.
    """
    function = implementation("norm_rotary_store", q.device.type)
    result: Tensor = function(q, k, v, positions, cos_sin, k_cache, v_cache, slot_mapping, q_weight, k_weight, eps)
    return result


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Causal attention of ``q [T, H, D]`` over the paged cache -> ``[T, H, D]``.

    The keys and values of this batch are already stored. Row t of sequence b attends to positions 0..its own, read through
    ``metadata.block_tables``; slots past the sequence are never read. Query head h uses KV head ``h // (H // K)``.
    """
    result: Tensor = implementation("attention", q.device.type)(q, k_cache, v_cache, metadata, scale)
    return result


def argmax(logits: Tensor) -> Tensor:
    """Index of the largest value of each row of ``[S, V]`` -> ``[S]`` int64; the lowest index wins a tie."""
    result: Tensor = implementation("argmax", logits.device.type)(logits)
    return result


def sample(logits: Tensor, draws: Sequence[TokenDraw]) -> Tensor:
    """Draw one token of each row of float32 ``logits [S, V]``, finite or -inf, as ``draws`` (S of them) say -> ``[S]`` int64.

    The steps are vLLM's: temperature, min_p, top_k, top_p, then the token at ``uniform`` in the cumulative distribution over
    what is left, in the order of token ids. The most likely token always stays; of equals the lower ids.
    """
    tokens: Tensor = implementation("sample", logits.device.type)(logits, draws)
    return tokens


def sample_rows(logits: Tensor, draws: DrawTensors) -> Tensor:
    """:func:`argmax` of the rows with temperature 0 and :func:`sample` of the others -> ``[S]`` int64, in one pass.

    A row of ``logits [S, V]`` with a NaN or +inf, or with nothing but -inf, gives -1. A backend's own version reads no value on
    the host, so that it may stand in a captured graph; it is used where argmax and sample are that backend's as well.
    """
    tokens: Tensor = implementation("sample_rows", logits.device.type)(logits, draws)
    return tokens
