"""Which tokens of a row stay: their weights, and the search for the cut that top_k and top_p make. Device functions only.

**Weights are integers**, ``floor(weight * SCALE)`` with ``SCALE`` such that a row weighs 2**61 at most, so sums of them are exact
whatever their order: the same draw gives the same token however a row is split. What weighs less than 2**-43 of the most likely
token (in a vocabulary of 262,144) has weight 0 and is never drawn.

**The cut** is exact and nothing is sorted: what stays is every token above some logit, and of those that have this logit so many
with the lowest ids. The logit is the least above which the weights (top_p) or the number (top_k) of tokens fall short of what is
to be kept; it is found on the bits of the logits, by narrowing their range ninefold a pass. The order is that of the logits:
where float32 probabilities of different logits coincide, the reference takes the lower id, and this the higher logit.
"""

# ruff: noqa: N803  # constexprs are upper-case, as everywhere in Triton

import triton
import triton.language as tl

from minivllm_kernels.triton.argmax import ordered_key

__all__ = [
    "ALL",
    "KEY_OF_INF",
    "KEY_OF_MINUS_INF",
    "fitting",
    "is_cut",
    "least_key",
    "list_floor",
    "share_of",
    "sharpness_of",
    "weigh_around",
    "weight_of",
]

LOG2E = tl.constexpr(1.4426950408889634)
KEY_OF_MINUS_INF = tl.constexpr(-2139095041)  # of what may never stay, and of the padding of a block
KEY_OF_INF = tl.constexpr(0x7F800000)
ALL = tl.constexpr(2**31)  # more than any row has tokens

# A list holds what is within so many units of temperature of the peak (6e-6 of its weight), and within so much in logits: at a
# low temperature a top_k reaches far down.
LIST_DEPTH = tl.constexpr(12.0)
LIST_LOGITS = tl.constexpr(16.0)


@triton.jit
def weight_of(x, peak, sharpness, min_p, SCALE: tl.constexpr):
    """``exp((x - peak) / temperature)`` in parts of SCALE, int64; 0 below min_p."""
    weight = tl.exp2((x - peak) * sharpness)
    return tl.where(weight >= min_p, weight * SCALE, 0.0).to(tl.int64)


@triton.jit
def sharpness_of(temperature):
    """What turns logits into powers of two. Finite, also for a temperature of nearly 0: only the peak has weight then."""
    return LOG2E / tl.maximum(temperature, 1.0e-30)


@triton.jit
def list_floor(peak, temperature):
    return peak - tl.maximum(temperature * LIST_DEPTH, LIST_LOGITS)


@triton.jit
def is_cut(top_p, top_k, width):
    return (top_p < 1.0) | ((top_k > 0) & (top_k < width))


@triton.jit
def least_key(
    values, size, need, low, high, peak, sharpness, min_p,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, WAYS: tl.constexpr, SCALE: tl.constexpr,
):  # fmt: skip
    """The least key, out of (low, high], above which the tokens weigh (or, COUNT, are) less than ``need``.

    Holds on to: what is above ``low`` is enough, what is above ``high`` is not. A pass divides the range by WAYS marks, and draws
    it in to the keys that there are: five passes over a list of some hundred tokens, nine over a flat row of 151,936.
    """
    while high - low > 1:
        step = (high - low + WAYS) // (WAYS + 1)
        marks = tl.minimum(low + step * (1 + tl.arange(0, WAYS)), high).to(tl.int32)
        above = tl.zeros([WAYS, BLOCK], tl.int64)
        first = tl.full([BLOCK], 2**31 - 1, tl.int32)
        last = tl.full([BLOCK], KEY_OF_MINUS_INF, tl.int32)
        for start in range(0, size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            x = tl.load(values + place, mask=place < size, other=float("-inf"))
            key = ordered_key(x)
            if COUNT:
                weight = tl.full([BLOCK], 1, tl.int64)
            else:
                weight = weight_of(x, peak, sharpness, min_p, SCALE)
            above += tl.where(key[None, :] > marks[:, None], weight[None, :], 0)
            first = tl.where(key > low, tl.minimum(first, key), first)
            last = tl.where(key <= high, tl.maximum(last, key), last)
        passed = tl.sum((tl.sum(above, axis=1) >= need).to(tl.int64), axis=0)
        least, most = tl.min(first, axis=0).to(tl.int64), tl.max(last, axis=0).to(tl.int64)
        high = tl.minimum(tl.minimum(high, low + step * (passed + 1)), most)
        low = tl.maximum(low + step * passed, least - 1)
    return high


@triton.jit
def weigh_around(values, size, key, peak, sharpness, min_p, BLOCK: tl.constexpr, SCALE: tl.constexpr):
    """Number and weight of the tokens above ``key``, and the number of those that have it."""
    count, mass = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    ties = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(values + place, mask=place < size, other=float("-inf"))
        keys = ordered_key(x)
        above = keys > key
        count += above.to(tl.int64)
        mass += tl.where(above, weight_of(x, peak, sharpness, min_p, SCALE), 0)
        ties += ((keys == key) & (place < size)).to(tl.int64)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0), tl.sum(ties, axis=0)


@triton.jit
def share_of(part, total):
    """``ceil(part * total)`` of a float64 and an int64. Rounded as float64 is: nine tenths of ten equal tokens are nine."""
    return tl.ceil(part * total.to(tl.float64)).to(tl.int64)


@triton.jit
def fitting(need, each, BITS: tl.constexpr):
    """How many of weight ``each`` it takes to reach ``need``, at most ``2**(BITS + 1) - 1``. No division: a call would spill."""
    count = tl.full([], 0, tl.int64)
    for bit in tl.static_range(BITS, -1, -1):
        more = count + (1 << bit)
        count = tl.where((more - 1) * each < need, more, count)
    return count
