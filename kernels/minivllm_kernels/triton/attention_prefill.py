"""Causal attention of many new tokens a sequence over the paged cache: a prompt, a chunk of one, or what follows a warm prefix.

A program owns one tile: ``BLOCK_M`` rows, which are the heads of one KV head's group for ``BLOCK_M // HEADS`` consecutive
tokens of one sequence. It reads the sequence's keys from position 0 on, from the cache, where this batch's are stored already,
in tiles of ``BLOCK_N``: first those that every row sees, without a mask; then those that the diagonal crosses; later ones
never.

A row depends on nothing but its own sequence, and takes its keys in the same tiles and order whatever was computed before: a
prompt in chunks, after a warm prefix or in other company gives the same bits, as long as each pass has more than one token of
it (one token goes to decode, which adds up in another order).

Programs come in a table, longest first, so that the last ones to end are short. Multiply-adds: ``2 * H * D`` for each pair of a
token and one that it sees. What is computed and masked is on average half of ``BLOCK_M // HEADS + BLOCK_N`` keys a row.
"""

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from minivllm_kernels.triton.attention_configurations import Tiles
from minivllm_kernels.triton.attention_inputs import AttentionInputs
from minivllm_kernels.triton.attention_tile import attend, load_queries
from minivllm_kernels.triton.launch import COMPILER_OPTIONS

__all__ = ["attention_prefill_kernel", "prefill", "tile_table", "tokens_a_tile"]


def tokens_a_tile(inputs: AttentionInputs, tiles: Tiles) -> int:
    """New tokens of one sequence that one program takes."""
    return tiles.m // inputs.heads_a_program(tiles.m)


def tile_table(query_lens: Sequence[int], seq_lens: Sequence[int] | None, tokens: int) -> list[tuple[int, int]]:
    """(sequence, its first new token) of every program, those with most keys first; sequences of one token have none."""
    context = [0] * len(query_lens) if seq_lens is None else [s - n for s, n in zip(seq_lens, query_lens, strict=True)]
    tiles = [(b, first) for b, new in enumerate(query_lens) if new > 1 for first in range(0, new, tokens)]
    return sorted(tiles, key=lambda tile: -(context[tile[0]] + tile[1]))


def prefill(inputs: AttentionInputs, table: Tensor, tiles: Tiles) -> None:
    """Write the rows of all programs in ``table`` (int32 ``[n, 2]`` on the device, made for these ``tiles``)."""
    heads = inputs.heads_a_program(tiles.m)
    programs = table.shape[0] * inputs.keys.shape[2] * -(-inputs.group // heads)
    metadata = inputs.metadata
    attention_prefill_kernel[(programs,)](
        inputs.q,
        inputs.keys,
        inputs.values,
        inputs.out,
        table,
        inputs.tables,
        metadata.query_starts,
        metadata.lengths,
        *inputs.strides(),
        inputs.score_scale,
        inputs.v_scale,
        **inputs.constants(),
        HEADS=heads,
        BLOCK_M=tiles.m,
        BLOCK_N=tiles.n,
        STAGES=tiles.num_stages,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **COMPILER_OPTIONS,
    )


@triton.jit(do_not_specialize=["table_stride"])  # it changes from pass to pass
def attention_prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    tiles,
    tables,
    query_starts,
    lengths,
    q_row_stride,
    q_head_stride,
    block_stride,
    slot_stride,
    kv_head_stride,
    table_stride,
    score_scale,
    v_scale,
    KV_HEADS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    FORMAT: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
):
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS  # noqa: N806  # programs that share the heads of one group
    TOKENS: tl.constexpr = BLOCK_M // HEADS  # noqa: N806
    tile = tl.program_id(0) // (KV_HEADS * PARTS)
    kv_head = tl.program_id(0) % (KV_HEADS * PARTS) // PARTS
    part = tl.program_id(0) % PARTS
    sequence = tl.load(tiles + tile * 2)
    first = tl.load(tiles + tile * 2 + 1)
    start = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start
    length = tl.load(lengths + sequence)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    token = first + m // HEADS
    member = part * HEADS + m % HEADS  # of the group
    live = (m // HEADS < TOKENS) & (token < count) & (member < GROUP)
    row = (start + first).to(tl.int64)  # the tile's first: within a tile 32 bits are enough
    head = kv_head * GROUP + member
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    query_offsets = (m // HEADS * q_row_stride + head * q_head_stride)[:, None] + d[None, :]
    query = load_queries(q + row * q_row_stride + query_offsets, mask, FORMAT)

    k_head = k_cache + kv_head.to(tl.int64) * kv_head_stride
    v_head = v_cache + kv_head.to(tl.int64) * kv_head_stride
    table = tables + sequence.to(tl.int64) * table_stride
    first_position = length - count + first
    seen_by_all = (first_position + 1) // BLOCK_N * BLOCK_N
    stop = tl.minimum(first_position + TOKENS, length)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    last = first_position + m // HEADS
    acc, row_sum, row_max = attend(
        acc, row_sum, row_max, query, last, k_head, v_head, table, 0, seen_by_all,
        block_stride, slot_stride, score_scale,
        False, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D, FORMAT, STAGES,
    )  # fmt: skip
    acc, row_sum, row_max = attend(
        acc, row_sum, row_max, query, last, k_head, v_head, table, seen_by_all, stop,
        block_stride, slot_stride, score_scale,
        True, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D, FORMAT, 2,
    )  # fmt: skip
    acc = acc * (v_scale / row_sum)[:, None]
    out_offsets = ((m // HEADS * (KV_HEADS * GROUP) + head) * HEAD_DIM)[:, None] + d[None, :]
    tl.store(out + row * (KV_HEADS * GROUP * HEAD_DIM) + out_offsets, acc.to(out.dtype.element_ty), mask=mask)
