"""The ops of the Triton backend, under their public names, for CUDA devices.

Before any is chosen a tiny kernel is launched once: Triton builds its launcher with the system's C compiler and Python's headers,
and a machine that lacks them is told so by ``explain()``, in place of an engine that ends at its first step.
"""

from functools import cache

import torch

from minivllm_kernels.metadata import AttentionGeometry
from minivllm_kernels.triton.argmax import argmax
from minivllm_kernels.triton.attention import attention
from minivllm_kernels.triton.attention_inputs import unsupported as unsupported_by_attention
from minivllm_kernels.triton.launch import interpreting
from minivllm_kernels.triton.norm_rotary_store import norm_rotary_store
from minivllm_kernels.triton.rms_norm import add_rms_norm, rms_norm
from minivllm_kernels.triton.rotary import rotary
from minivllm_kernels.triton.sampling import sample, sample_rows
from minivllm_kernels.triton.silu_and_mul import silu_and_mul
from minivllm_kernels.triton.store_kv import store_kv

OF_HEADS = ("attention", "norm_rotary_store", "rotary", "store_kv")

__all__ = [
    "add_rms_norm",
    "argmax",
    "attention",
    "norm_rotary_store",
    "rms_norm",
    "rotary",
    "sample",
    "sample_rows",
    "silu_and_mul",
    "store_kv",
    "unavailable",
    "unsupported",
]


def unavailable() -> str | None:
    """Why these kernels cannot run on a device here, or None. Where triton is missing, this module does not import."""
    if interpreting():
        return "TRITON_INTERPRET is set: kernels would run in the interpreter, on the CPU; unset it"
    if not torch.cuda.is_available():
        return "no CUDA device is available to torch"
    return _tried()


def unsupported(op: str, geometry: AttentionGeometry) -> str | None:
    """Why ``op`` cannot be done for a model of this geometry, or None."""
    return unsupported_by_attention(geometry) if op in OF_HEADS else None


@cache
def _tried() -> str | None:
    """What stands in the way of a first launch on the current device, or None."""
    try:
        fine = bool((silu_and_mul(torch.ones(1, 2, device="cuda")) > 0.7).all())  # 1 / (1 + 1/e) is 0.731
    except Exception as error:  # no compiler, no headers, no code for this card: whatever it is, nothing else would run either
        return f"a first kernel does not run here ({type(error).__name__}: {error!s:.200})"
    return None if fine else "a first kernel computes wrong numbers here"
