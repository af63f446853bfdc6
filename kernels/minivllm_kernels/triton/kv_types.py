"""In which types keys and values may stand in the cache, and how a kernel reads and writes each.

bfloat16, float16 and float32 are read as they are. The two kinds of 8-bit floats are handed to a kernel as bytes, with a
constexpr ``FORMAT`` that says what the bytes mean, so that they work on every card: sm_80 has no instruction for e4m3, and
Triton refuses the type there. A byte is widened to float16, which holds every value of both kinds exactly; that is two or three
integer instructions an element, and one for two elements where the card converts in hardware (e4m3 from sm_89 on).

A stored value is ``value / scale`` with one float scale a tensor (``k_scale``, ``v_scale``; 1.0 unless the checkpoint has
others), rounded to nearest even, and saturated at the largest finite value, as NVIDIA's own conversions are
(``cvt.rn.satfinite``). NaN is stored as NaN; reading e4m3 by bits gives 480 for it, since no kernel relies on NaN coming back.

Formats: OCP 8-bit Floating Point Specification 1.0 (2023), E4M3 and E5M2.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from minivllm_kernels.triton.launch import FLOATS

__all__ = ["FLOAT8", "as_stored", "check_scale", "narrow", "widen"]

FLOAT8 = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
"""dtype -> ``FORMAT``. There are also ``plain``, and ``e4m3_hardware``: e4m3 read by the card's own instruction."""

HARDWARE_E4M3 = (8, 9)


def as_stored(op: str, cache: Tensor) -> tuple[Tensor, str]:
    """``cache`` as the kernel takes it, and the ``FORMAT`` that the kernel is compiled with.

    Raises:
        ValueError: a dtype that no kernel reads.
    """
    if cache.dtype in FLOATS:
        return cache, "plain"
    if cache.dtype not in FLOAT8:
        raise ValueError(
            f"{op}: a cache of {cache.dtype}; keys and values are stored as bfloat16, float16, float32, float8_e4m3fn "
            "or float8_e5m2"
        )
    kind = FLOAT8[cache.dtype]
    if kind == "e4m3" and cache.is_cuda and torch.cuda.get_device_capability(cache.device) >= HARDWARE_E4M3:
        kind = "e4m3_hardware"
    return cache.view(torch.uint8), kind


def check_scale(op: str, name: str, scale: float) -> None:
    """Scales are positive and finite, else a ValueError."""
    if not 0.0 < scale < float("inf"):
        raise ValueError(f"{op}: {name}={scale}; the scale of a cache must be positive and finite, 1.0 stores values as they are")


@triton.jit
def widen(x, FORMAT: tl.constexpr):  # noqa: N803
    """What was loaded from a cache, as numbers: bytes become float16, other types stay. Not yet multiplied by the scale."""
    wide = x
    if FORMAT == "e4m3_hardware":
        wide = x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    elif FORMAT == "e4m3":
        # Four bits of exponent stand in the low four of float16's five, whose bias is greater by 8. Denormals come out right.
        bits = x.to(tl.uint16)
        wide = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    elif FORMAT == "e5m2":
        wide = (x.to(tl.uint16) << 8).to(tl.float16, bitcast=True)  # the upper half of a float16
    return wide


@triton.jit
def narrow(x, dtype: tl.constexpr, FORMAT: tl.constexpr):  # noqa: N803
    """float32 ``x``, already divided by the scale, as it is stored: ``dtype`` is the element type of the cache's pointer."""
    if FORMAT == "plain":
        stored = x.to(dtype)
    elif FORMAT == "e5m2":
        stored = _round_to_byte(x, 2, 15, 57344.0)
    else:
        stored = _round_to_byte(x, 3, 7, 448.0)
    return stored


@triton.jit
def _round_to_byte(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr):  # noqa: N803
    """``MANTISSA`` bits of mantissa, the bias of the exponent, and the largest finite value of the format."""
    STEPS: tl.constexpr = 1 << (BIAS + MANTISSA - 1)  # noqa: N806  # in 1.0, below the least normal value
    sign = (x.to(tl.uint32, bitcast=True) >> 31) << 7
    size = tl.minimum(tl.abs(x), LARGEST)
    bits = size.to(tl.uint32, bitcast=True)
    # Add just below half of the last place that stays, one more where that is odd, and cut off: to nearest, ties to even.
    odd = (bits >> (23 - MANTISSA)) & 1
    normal = ((bits + ((1 << (22 - MANTISSA)) - 1) + odd) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    # Below the least normal value all steps are equal: adding 2 ** 23 rounds to a whole number of them.
    denormal = (size * STEPS + 8388608.0).to(tl.uint32, bitcast=True) & 0xFF
    code = tl.where(size * STEPS < (1 << MANTISSA), denormal, normal)
    return (tl.where(x != x, 0x7F, code) | sign).to(tl.uint8)
