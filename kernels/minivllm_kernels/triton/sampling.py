"""One token of each row of logits ``[S, V]``: greedy, or drawn from what temperature, min_p, top_k and top_p leave.

Every row has its own draw, and a batch may mix all kinds. Nothing is read on the host and every shape follows from S and V, so
the launches may stand in a captured graph. There are four, the parts of :mod:`minivllm_kernels.triton.argmax` first:

1. *peaks*: the best token of each part of a row. A greedy row is done with this.
2. *weigh*: the weight ``exp((x - peak) / T)`` of every token, summed by block; for top_k and top_p a list of the likely ones.
3. *gather*: the lists of a row's parts side by side, in the order of token ids. Left out where a row is one part.
4. *choose*, one program a row: the cut (:mod:`minivllm_kernels.triton.cut`), then the token at ``uniform`` in the cumulative
   weights.

**Cost**: two reads of the row, in *peaks* and *weigh*. The second is from L2 while all rows fit it (60 of 151,936 in 50 MB);
beyond that the floor is 1.2 MB a row over the memory's bandwidth. *Choose* reads one block where nothing is cut, else some ten
times the list, a few hundred tokens as a rule. A distribution so flat that what is to be kept may be missing from the list is
searched whole: ten more reads, by one program a row.
"""

# ruff: noqa: N803  # constexprs are upper-case, as everywhere in Triton

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm_kernels.draws import DrawTensors, TokenDraw
from minivllm_kernels.triton.argmax import best_of, check_logits, key_value, ordered_key, packed_peaks, split
from minivllm_kernels.triton.compilation import CompileCase
from minivllm_kernels.triton.cut import (
    ALL,
    KEY_OF_INF,
    KEY_OF_MINUS_INF,
    fitting,
    is_cut,
    least_key,
    list_floor,
    share_of,
    sharpness_of,
    weigh_around,
    weight_of,
)
from minivllm_kernels.triton.launch import COMPILER_OPTIONS, next_power_of_2
from minivllm_kernels.triton.likely import gather_kernel, weigh_kernel

__all__ = ["COMPILE_CASES", "sample", "sample_rows", "sample_with_cuts"]

LIST_PER_PART = 4096
SEARCH_BLOCK = 1024
GATHER_BLOCK = 1024
WAYS = 8  # marks that a pass of the search weighs at once
NUM_WARPS = 8
CHOOSE_WARPS = 16  # with 8 of them ptxas spills some words for sm_80

NOTHING = tl.constexpr(-1)


def sample(logits: Tensor, draws: Sequence[TokenDraw]) -> Tensor:
    """See :func:`minivllm_kernels.sample`. One copy to the device, and no wait."""
    return sample_rows(logits, DrawTensors.build(draws, logits.device))


def sample_rows(logits: Tensor, draws: DrawTensors) -> Tensor:
    """See :func:`minivllm_kernels.sample_rows`. Rows may be strided; what is no float32 is copied first.

    Raises:
        ValueError: not two-dimensional, no columns, strided columns, no float, or not as many draws as rows.
    """
    return sample_with_cuts(logits, draws)[0]


def sample_with_cuts(logits: Tensor, draws: DrawTensors, ways: int = WAYS) -> tuple[Tensor, Tensor]:
    """:func:`sample_rows`, and what stayed of each random row: ``[S, 2]`` int64.

    The first is the :func:`~minivllm_kernels.triton.argmax.ordered_key` above which every token stays, the second how many of
    those that have it stay, lowest ids first. ``min_p`` comes on top. ``ways`` is a power of two and changes the speed only.
    """
    check_logits("sample_rows", logits)
    rows, width = logits.shape
    if draws.uniform.shape[0] != rows:
        raise ValueError(f"sample_rows: {draws.uniform.shape[0]} draws for {rows} rows of logits; use draws.first({rows})")
    device = logits.device
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    cuts = torch.empty((rows, 2), dtype=torch.int64, device=device)
    if rows == 0:
        return tokens, cuts
    logits = logits.float()
    block, columns, parts = split(rows, width)
    room = min(columns, LIST_PER_PART)
    packed = packed_peaks(logits)
    blocks = triton.cdiv(width, block)
    masses = torch.empty((rows, blocks), dtype=torch.int64, device=device)
    listed = torch.empty((rows, parts), dtype=torch.int64, device=device)
    counts = torch.empty((rows, parts), dtype=torch.int32, device=device)
    flat = int(parts > 1)  # where the lists stand side by side
    values = torch.empty((1 + flat, rows, parts, room), dtype=torch.float32, device=device)
    ids = torch.empty((1 + flat, rows, parts, room), dtype=torch.int32, device=device)
    bits = max(width - 1, 1).bit_length()
    sizes = {"PARTS": next_power_of_2(parts), "ROOM": room}
    scale = {"SCALE": 2.0 ** (61 - bits)}
    given = (draws.temperature, draws.min_p, draws.top_p, draws.top_k, masses, listed, counts)
    options = {"num_warps": NUM_WARPS, "num_stages": 1, **COMPILER_OPTIONS}
    shape = (width, logits.stride(0), blocks)
    weigh_kernel[(rows, parts)](logits, packed, *given, values, ids, *shape, columns, BLOCK=block, **sizes, **scale, **options)
    if flat:
        gather_kernel[(rows, parts)](counts, values, ids, values[1], ids[1], BLOCK=GATHER_BLOCK, **sizes, **options)
    options["num_warps"] = CHOOSE_WARPS
    search = {"BLOCKS": next_power_of_2(blocks), "SEARCH": SEARCH_BLOCK, "WAYS": ways, "BITS": bits}
    outputs = (draws.uniform, tokens, cuts)
    _choose_kernel[(rows,)](
        logits,
        packed,
        *given,
        values[flat],
        ids[flat],
        *shape,
        *outputs,
        parts,
        BLOCK=block,
        **search,
        **sizes,
        **scale,
        **options,
    )
    return tokens, cuts


@triton.jit
def _choose_kernel(
    logits, packed, temperatures, min_ps, top_ps, top_ks, masses, listed, counts, values, ids, width, row_stride, blocks,
    uniforms, tokens, cuts, parts,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SEARCH: tl.constexpr, WAYS: tl.constexpr, BITS: tl.constexpr,
    PARTS: tl.constexpr, ROOM: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    best_key, best = best_of(packed, row, parts, PARTS)
    temperature = tl.load(temperatures + row)
    healthy = (best_key > KEY_OF_MINUS_INF) & (best_key < KEY_OF_INF)
    token = tl.where(healthy, best, NOTHING)
    if healthy & (temperature > 0.0):
        peak = key_value(best_key)
        sharpness, min_p = sharpness_of(temperature), tl.load(min_ps + row)
        top_p, top_k = tl.load(top_ps + row), tl.load(top_ks + row)
        uniform = (tl.load(uniforms + row) * 9007199254740992.0).to(tl.int64) << 11  # of 2**64, unsigned
        row_logits = logits + row * row_stride
        block = tl.arange(0, BLOCKS)
        mass = tl.load(masses + row * blocks + block, mask=block < blocks, other=0)
        total = tl.sum(mass, axis=0)
        if is_cut(top_p, top_k, width):
            # The list, if what stays is surely in it: what it lacks is below its floor, and may have no weight at all.
            part = tl.arange(0, PARTS)
            likely = tl.load(counts + row * parts + part, mask=part < parts, other=0)
            size = tl.sum(likely, axis=0)
            floor = list_floor(peak, temperature)
            limited = (top_k > 0) & (top_k < width)
            holds = weight_of(floor, peak, sharpness, min_p, SCALE) == 0
            if limited:
                holds = holds | (size >= top_k)
            else:
                held = tl.sum(tl.load(listed + row * parts + part, mask=part < parts, other=0), axis=0)
                holds = holds | (held >= share_of(top_p, total))
            holds = holds & (tl.max(likely, axis=0) <= ROOM)
            searched = row_logits
            low = tl.full([], KEY_OF_MINUS_INF, tl.int64) - 1
            if holds:
                searched = values + row * parts * ROOM
                low = ordered_key(floor).to(tl.int64) - 1
            else:
                size = tl.full([], 0, tl.int32) + width

            high = best_key.to(tl.int64)
            cut = low
            ties = tl.full([], ALL, tl.int64)
            above = total  # all of it, more than any share
            if limited & (size >= top_k):
                need = top_k.to(tl.int64)
                cut = least_key(searched, size, need, low, high, peak, sharpness, min_p, True, SEARCH, WAYS, SCALE)
                count, above, have = weigh_around(searched, size, cut, peak, sharpness, min_p, SEARCH, SCALE)
                ties = tl.minimum(need - count, have)
                each = weight_of(key_value(cut.to(tl.int32)), peak, sharpness, min_p, SCALE)
                total = above + ties * each
            if top_p < 1.0:
                need = share_of(top_p, total)
                if above >= need:
                    cut = least_key(searched, size, need, cut, high, peak, sharpness, min_p, False, SEARCH, WAYS, SCALE)
                    _, above, ties = weigh_around(searched, size, cut, peak, sharpness, min_p, SEARCH, SCALE)
                each = weight_of(key_value(cut.to(tl.int32)), peak, sharpness, min_p, SCALE)
                ties = tl.minimum(ties, fitting(need - above, each, BITS))
                total = above + ties * each
            tl.store(cuts + 2 * row, cut)
            tl.store(cuts + 2 * row + 1, ties)

            target = tl.umulhi(uniform, total)
            reached, tied = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
            start = tl.full([], 0, tl.int32)
            found = tl.full([], 0, tl.int32) + size
            while (start < size) & (found == size):
                place = start + tl.arange(0, SEARCH)
                x = tl.load(searched + place, mask=place < size, other=float("-inf"))
                key = ordered_key(x)
                tie = (key == cut).to(tl.int64)
                stays = (key > cut) | ((key == cut) & (tied + tl.cumsum(tie, axis=0) <= ties))
                weight = tl.where(stays, weight_of(x, peak, sharpness, min_p, SCALE), 0)
                upto = reached + tl.cumsum(weight, axis=0)
                found = tl.min(tl.where(upto > target, place, size), axis=0)
                reached += tl.sum(weight, axis=0)
                tied += tl.sum(tie, axis=0)
                start += SEARCH
            token = found
            if holds:
                token = tl.load(ids + row * parts * ROOM + found)
        else:
            tl.store(cuts + 2 * row, KEY_OF_MINUS_INF)
            tl.store(cuts + 2 * row + 1, ALL)
            target = tl.umulhi(uniform, total)
            upto = tl.cumsum(mass, axis=0)
            number = tl.sum((upto <= target).to(tl.int32), axis=0)
            reached = tl.sum(tl.where(block < number, mass, 0), axis=0)
            column = number * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(row_logits + column, mask=column < width, other=float("-inf"))
            within = reached + tl.cumsum(weight_of(x, peak, sharpness, min_p, SCALE), axis=0)
            token = number * BLOCK + tl.sum((within <= target).to(tl.int32), axis=0)
    tl.store(tokens + row, token)


def _cases() -> tuple[CompileCase, ...]:
    """Of a large vocabulary in many parts and in one, and of one that fits a block."""
    draws = {"temperatures": "*fp32", "min_ps": "*fp32", "top_ps": "*fp64", "top_ks": "*i32"}
    sums = {"masses": "*i64", "listed": "*i64", "counts": "*i32", "values": "*fp32", "ids": "*i32"}
    cases = []
    for width, block, parts, room in ((151_936, 2048, 128, 2048), (128_256, 2048, 1, 4096), (500, 512, 1, 512)):
        blocks, bits = next_power_of_2(triton.cdiv(width, block)), (width - 1).bit_length()
        columns = "i32" if width % 16 else "i32:16"
        shape = {"width": columns, "row_stride": columns, "blocks": "i32:1" if blocks == 1 else "i32"}
        given = {"logits": "*fp32", "packed": "*i64", **draws, **sums, **shape}
        results = {"uniforms": "*fp64", "tokens": "*i64", "cuts": "*i64", "parts": "i32:1" if parts == 1 else "i32"}
        sizes = {"BLOCK": block, "PARTS": parts, "ROOM": room, "SCALE": 2.0 ** (61 - bits)}
        search = {"BLOCKS": blocks, "SEARCH": SEARCH_BLOCK, "WAYS": WAYS, "BITS": bits}
        name = f"{width} in {parts}"
        cases += [
            CompileCase(f"sample weigh {name}", weigh_kernel, {**given, "columns": "i32:16"}, sizes, NUM_WARPS, 1),
            CompileCase(f"sample choose {name}", _choose_kernel, {**given, **results}, {**sizes, **search}, CHOOSE_WARPS, 1),
        ]
    lists = {"counts": "*i32", "values": "*fp32", "ids": "*i32", "flat_values": "*fp32", "flat_ids": "*i32"}
    gather = {"BLOCK": GATHER_BLOCK, "PARTS": 128, "ROOM": 2048}
    return (*cases, CompileCase("sample gather", gather_kernel, lists, gather, NUM_WARPS, 1))


COMPILE_CASES = _cases()
