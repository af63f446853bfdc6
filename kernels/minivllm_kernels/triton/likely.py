"""Weights of the tokens of each row, summed by block, and lists of the likely ones: what :mod:`minivllm_kernels.triton.sampling`
looks at before it looks at whole rows again. Kernels only; shapes and launches are in that module.
"""

# ruff: noqa: N803  # constexprs are upper-case, as everywhere in Triton

import triton
import triton.language as tl

from minivllm_kernels.triton.argmax import best_of, key_value
from minivllm_kernels.triton.cut import KEY_OF_INF, KEY_OF_MINUS_INF, is_cut, list_floor, sharpness_of, weight_of

__all__ = ["gather_kernel", "weigh_kernel"]


@triton.jit
def weigh_kernel(
    logits, packed, temperatures, min_ps, top_ps, top_ks, masses, listed, counts, values, ids, width, row_stride, blocks, columns,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, ROOM: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    key, _ = best_of(packed, row, parts, PARTS)
    temperature = tl.load(temperatures + row)
    count = tl.full([], 0, tl.int32)
    mass = tl.full([], 0, tl.int64)
    if (temperature > 0.0) & (key > KEY_OF_MINUS_INF) & (key < KEY_OF_INF):
        peak = key_value(key)
        sharpness, min_p = sharpness_of(temperature), tl.load(min_ps + row)
        cut = is_cut(tl.load(top_ps + row), tl.load(top_ks + row), width)
        floor = list_floor(peak, temperature)
        mine = (row * parts + part) * ROOM
        for start in range(0, columns, BLOCK):
            column = part * columns + start + tl.arange(0, BLOCK)
            x = tl.load(logits + row * row_stride + column, mask=column < width, other=float("-inf"))
            weight = weight_of(x, peak, sharpness, min_p, SCALE)
            number = (part * columns + start) // BLOCK
            tl.store(masses + row * blocks + number, tl.sum(weight, axis=0), mask=number < blocks)
            if cut:
                likely = x >= floor
                mass += tl.sum(tl.where(likely, weight, 0), axis=0)
                place = count + tl.cumsum(likely.to(tl.int32), axis=0) - 1
                fits = likely & (place < ROOM)
                tl.store(values + mine + place, x, mask=fits)
                tl.store(ids + mine + place, column, mask=fits)
                count += tl.sum(likely.to(tl.int32), axis=0)
    tl.store(counts + row * parts + part, count)
    tl.store(listed + row * parts + part, mass)


@triton.jit
def gather_kernel(counts, values, ids, flat_values, flat_ids, BLOCK: tl.constexpr, PARTS: tl.constexpr, ROOM: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts = tl.num_programs(1)
    each = tl.arange(0, PARTS)
    numbers = tl.minimum(tl.load(counts + row * parts + each, mask=each < parts, other=0), ROOM)
    source = (row * parts + part) * ROOM
    target = row * parts * ROOM + tl.sum(tl.where(each < part, numbers, 0), axis=0)
    mine = tl.sum(tl.where(each == part, numbers, 0), axis=0)
    for start in range(0, mine, BLOCK):
        place = start + tl.arange(0, BLOCK)
        inside = place < mine
        tl.store(flat_values + target + place, tl.load(values + source + place, mask=inside), mask=inside)
        tl.store(flat_ids + target + place, tl.load(ids + source + place, mask=inside), mask=inside)
