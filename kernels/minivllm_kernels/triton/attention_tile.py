"""What prefill and decode attention share inside a kernel: one pass of online softmax over the tiles of a paged cache.

Rows of the ``M`` dimension are query rows: all heads of one group for one or more tokens, so that a tile of keys and values,
once loaded, serves every head that shares it. Columns ``N`` are keys. A tile of keys need not lie in one block: each key's
block is looked up, so any block size goes with any tile. The offset of a block is a 64-bit product.

Per row the loop keeps the greatest score so far, the sum of ``exp2(score - greatest)`` and the sum of those weights times the
values, all in float32 (Milakov & Gimelshein 2018; Dao 2023, FlashAttention-2). Scores are in units of log 2, so that one
multiply-add and ``exp2`` make a weight.
"""

import triton
import triton.language as tl

from minivllm_kernels.triton.kv_types import widen
from minivllm_kernels.triton.launch import interpreting

__all__ = ["attend", "load_queries"]

# Triton 3.9's interpreter multiplies the bit patterns of bfloat16. There, products are taken of the same numbers in float32.
INTERPRETED = tl.constexpr(interpreting())


@triton.jit
def load_queries(pointers, mask, FORMAT: tl.constexpr):  # noqa: N803
    """A tile of queries in the type that the products are computed in: float16 over a cache of bytes, whose values it holds
    exactly and where bfloat16 would take two more conversions an element; else the queries' own."""
    q = tl.load(pointers, mask=mask, other=0.0)
    if FORMAT != "plain" and q.dtype == tl.bfloat16:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return q


@triton.jit
def attend(
    acc,
    row_sum,
    row_max,
    q,
    last,
    k_head,
    v_head,
    table,
    start,
    stop,
    block_stride,
    slot_stride,
    score_scale,
    MASKED: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
    FORMAT: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
):
    """Take the keys ``start .. stop - 1`` into ``acc [M, BLOCK_D]``, ``row_sum [M]`` and ``row_max [M]``.

    Not ``MASKED``: ``start`` and ``stop`` are multiples of ``BLOCK_N`` and every row sees every key. Else row m sees the keys up
    to ``last[m]``, and slots from ``stop`` on are not read at all: what stands there may be NaN. Every row must see one key of
    the first tile that is ever taken in. ``STAGES - 1`` tiles are on their way while one is computed.
    """
    d = tl.arange(0, BLOCK_D)
    # Blocks are looked up one tile ahead, by hand: the compiler shares its stages among a load and those whose addresses wait
    # for it, and with three or four stages asks for a tile only at the end of the turn before.
    n = start + tl.arange(0, BLOCK_N)
    block = tl.load(table + n // BLOCK_SIZE, mask=n < stop, other=0)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < stop
        this_block = block.to(tl.int64)
        following = n + BLOCK_N
        block = tl.load(table + following // BLOCK_SIZE, mask=following < stop, other=0)
        offsets = (this_block * block_stride + n % BLOCK_SIZE * slot_stride)[:, None] + d[None, :]
        k = widen(_load(k_head + offsets, inside, d, MASKED, HEAD_DIM, BLOCK_D), FORMAT).to(q.dtype)
        scores = _dot(q, tl.trans(k), tl.zeros([q.shape[0], BLOCK_N], tl.float32))
        if MASKED:
            scores = tl.where((n[None, :] <= last[:, None]) & inside[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(scores * score_scale - new_max[:, None])
        fade = tl.exp2(row_max - new_max)
        row_sum = row_sum * fade + tl.sum(weights, 1)
        v = widen(_load(v_head + offsets, inside, d, MASKED, HEAD_DIM, BLOCK_D), FORMAT).to(q.dtype)
        acc = _dot(weights.to(q.dtype), v, acc * fade[:, None])
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def _load(pointers, inside, d, MASKED: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):  # noqa: N803
    """Lanes past the head's own size are not read either: a vector has a power of two of them."""
    if MASKED and HEAD_DIM != BLOCK_D:
        tile = tl.load(pointers, mask=inside[:, None] & (d[None, :] < HEAD_DIM), other=0)
    elif MASKED:
        tile = tl.load(pointers, mask=inside[:, None], other=0)
    elif HEAD_DIM != BLOCK_D:
        tile = tl.load(pointers, mask=d[None, :] < HEAD_DIM, other=0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _dot(a, b, acc):
    """``acc + a @ b`` in float32. float32 operands are not rounded to tf32."""
    if INTERPRETED:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")
