"""Attention of one new token a sequence over the paged cache, where reading keys and values is all the work there is.

A program owns one KV head of one sequence, its whole group of query heads as the rows of one tile, and one split of the
context: it reads each key and value once, ``2 * K * D`` elements a token of context in all, and that is the floor. Long
contexts are split, so that few sequences keep a whole card busy. The size of a split follows from the sequence's own length and
the model's shape; how many programs share the splits follows from numbers that the host knows (sequences, a bound of their
lengths, SMs), so that a captured graph has a fixed grid. A program takes one split after another, and ends at once if there is
none for it. A row is therefore the same, to the bit, alone and in company, in a captured graph and outside.

What a split found is kept in float32 with the logarithm of its weight, and a second kernel merges: 1 / 64 of the bytes of keys
and values for a group of 4 in 16-bit types, written and read once. A sequence of one split is written at once.

Products go through tensor cores although 16 rows are more than most groups have: the idle rows cost nothing, since at 16 rows a
tile needs 16 multiply-adds a byte of 16-bit keys, a twentieth of what the cards do in the time of reading it. The other form,
products broadcast over a small group in ordinary registers, needs two conversions and ``2 * group`` multiply-adds an element
outside the tensor cores, as much as they have to give from a group of four on.

A sequence of length 0 (padding of a captured graph) reads nothing and gets a row of zeros.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm_kernels.triton.attention_configurations import LEAST_SPLIT, Tiles, max_splits
from minivllm_kernels.triton.attention_inputs import AttentionInputs
from minivllm_kernels.triton.attention_tile import attend, load_queries
from minivllm_kernels.triton.launch import COMPILER_OPTIONS, next_power_of_2

__all__ = ["Splits", "attention_decode_kernel", "decode", "merge_splits_kernel", "plan_splits"]

PROGRAMS_AN_SM = 16  # several rounds of what an SM holds, so that long and short sequences even out
SPLITS_A_PROGRAM = 8  # at most, where the host's bound of the lengths comes true


class Splits(NamedTuple):
    """How contexts are split.

    Attributes:
        most: splits that one sequence can have: part of the layout of the workspace.
        programs: that share the splits of one sequence and KV head.
        logs: float32 ``[sequences, H, most]``: logarithm of the weight of each split, base 2.
        sums: float32 ``[sequences, H, most, D]``: what each split gives alone. None: no sequence has two splits.
    """

    most: int
    programs: int
    logs: Tensor | None
    sums: Tensor | None


def plan_splits(inputs: AttentionInputs, num_sequences: int, tiles: Tiles, num_sms: int) -> Splits:
    """For ``num_sequences`` sequences no longer than the metadata's bound, with room for what the splits find."""
    heads = inputs.heads_a_program(tiles.m)
    programs = inputs.keys.shape[2] * -(-inputs.group // heads)
    most = max_splits(programs)
    possible = min(most, -(-inputs.metadata.max_seq_len // LEAST_SPLIT))
    if possible <= 1:
        return Splits(most, 1, None, None)
    wanted = max(-(-PROGRAMS_AN_SM * num_sms // (num_sequences * programs)), -(-possible // SPLITS_A_PROGRAM))
    logs = torch.empty((num_sequences, inputs.q.shape[1], most), dtype=torch.float32, device=inputs.q.device)
    sums = torch.empty((*logs.shape, inputs.q.shape[2]), dtype=torch.float32, device=inputs.q.device)
    return Splits(most, min(wanted, possible), logs, sums)


def decode(inputs: AttentionInputs, rows: Tensor | None, num_sequences: int, splits: Splits, tiles: Tiles) -> None:
    """Write the row of each sequence in ``rows`` (int32 ``[num_sequences]`` on the device), which have one new token each.

    ``rows`` None: sequences 0 to ``num_sequences - 1``.
    """
    heads = inputs.heads_a_program(tiles.m)
    metadata = inputs.metadata
    programs = num_sequences * inputs.keys.shape[2] * -(-inputs.group // heads)
    attention_decode_kernel[(programs, splits.programs)](
        inputs.q,
        inputs.keys,
        inputs.values,
        inputs.out,
        splits.sums,
        splits.logs,
        rows,
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
        LEAST_SPLIT=LEAST_SPLIT,
        MAX_SPLITS=splits.most,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **COMPILER_OPTIONS,
    )
    if splits.sums is None:
        return
    head_dim = inputs.q.shape[2]
    merge_splits_kernel[(num_sequences, inputs.q.shape[1])](
        splits.sums,
        splits.logs,
        inputs.out,
        rows,
        metadata.query_starts,
        metadata.lengths,
        NUM_HEADS=inputs.q.shape[1],
        HEAD_DIM=head_dim,
        BLOCK_N=tiles.n,
        BLOCK_D=max(next_power_of_2(head_dim), 16),
        LEAST_SPLIT=LEAST_SPLIT,
        MAX_SPLITS=splits.most,
        num_warps=4,
        num_stages=1,
        **COMPILER_OPTIONS,
    )


@triton.jit(do_not_specialize=["table_stride"])  # it changes from pass to pass
def attention_decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    sums,
    logs,
    rows,
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
    LEAST_SPLIT: tl.constexpr,  # noqa: N803
    MAX_SPLITS: tl.constexpr,  # noqa: N803
):
    PARTS: tl.constexpr = (GROUP + HEADS - 1) // HEADS  # noqa: N806  # programs that share the heads of one group
    index = tl.program_id(0) // (KV_HEADS * PARTS)
    kv_head = tl.program_id(0) % (KV_HEADS * PARTS) // PARTS
    part = tl.program_id(0) % PARTS
    sequence = index if rows is None else tl.load(rows + index)
    length = tl.load(lengths + sequence)
    row = tl.load(query_starts + sequence).to(tl.int64)

    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    member = part * HEADS + m  # of the group
    head = kv_head * GROUP + member
    live = (m < HEADS) & (member < GROUP)
    mask = live[:, None] & (d < HEAD_DIM)[None, :]
    query = load_queries(q + row * q_row_stride + (head * q_head_stride)[:, None] + d[None, :], mask, FORMAT)
    k_head = k_cache + kv_head.to(tl.int64) * kv_head_stride
    v_head = v_cache + kv_head.to(tl.int64) * kv_head_stride
    table = tables + sequence.to(tl.int64) * table_stride
    out_offsets = (head * HEAD_DIM)[:, None] + d[None, :]
    out += row * (KV_HEADS * GROUP * HEAD_DIM)

    size = _split_size(length, LEAST_SPLIT, MAX_SPLITS, BLOCK_N)
    splits = tl.cdiv(length, size)
    if (splits == 0) & (tl.program_id(1) == 0):
        tl.store(out + out_offsets, tl.zeros([BLOCK_M, BLOCK_D], out.dtype.element_ty), mask=mask)
    for split in tl.range(tl.program_id(1), splits, tl.num_programs(1), num_stages=1):
        start = split * size
        stop = tl.minimum(start + size, length)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
        last = tl.zeros([BLOCK_M], tl.int32) + (stop - 1)
        acc, row_sum, row_max = attend(
            acc, row_sum, row_max, query, last, k_head, v_head, table, start, stop, block_stride, slot_stride, score_scale,
            True, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_D, FORMAT, STAGES,
        )  # fmt: skip
        acc = acc * (v_scale / row_sum)[:, None]
        if sums is None or splits == 1:
            tl.store(out + out_offsets, acc.to(out.dtype.element_ty), mask=mask)
        else:
            place = (index.to(tl.int64) * (KV_HEADS * GROUP) + head) * MAX_SPLITS + split
            tl.store(sums + place[:, None] * HEAD_DIM + d[None, :], acc, mask=mask)
            tl.store(logs + place, row_max + tl.log2(row_sum), mask=live)


@triton.jit
def merge_splits_kernel(
    sums,
    logs,
    out,
    rows,
    query_starts,
    lengths,
    NUM_HEADS: tl.constexpr,  # noqa: N803
    HEAD_DIM: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_D: tl.constexpr,  # noqa: N803
    LEAST_SPLIT: tl.constexpr,  # noqa: N803
    MAX_SPLITS: tl.constexpr,  # noqa: N803
):
    index, head = tl.program_id(0), tl.program_id(1)
    sequence = index if rows is None else tl.load(rows + index)
    length = tl.load(lengths + sequence)
    splits = tl.cdiv(length, _split_size(length, LEAST_SPLIT, MAX_SPLITS, BLOCK_N))
    if splits > 1:
        s = tl.arange(0, MAX_SPLITS)
        d = tl.arange(0, BLOCK_D)
        place = (index.to(tl.int64) * NUM_HEADS + head) * MAX_SPLITS + s
        log = tl.load(logs + place, mask=s < splits, other=float("-inf"))
        weights = tl.exp2(log - tl.max(log, 0))
        mask = (s < splits)[:, None] & (d < HEAD_DIM)[None, :]
        parts = tl.load(sums + place[:, None] * HEAD_DIM + d[None, :], mask=mask, other=0.0)
        merged = tl.sum(parts * weights[:, None], 0) / tl.sum(weights, 0)
        row = tl.load(query_starts + sequence).to(tl.int64)
        tl.store(out + (row * NUM_HEADS + head) * HEAD_DIM + d, merged.to(out.dtype.element_ty), mask=d < HEAD_DIM)


@triton.jit
def _split_size(length, LEAST_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):  # noqa: N803
    """Keys of one split: whole tiles, and a function of the sequence's own length, whatever its company."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, MAX_SPLITS), BLOCK_N) * BLOCK_N, LEAST_SPLIT)
