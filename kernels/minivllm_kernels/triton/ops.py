"""The ops of the Triton backend, under their public names, for CUDA devices."""

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
    return None


def unsupported(op: str, geometry: AttentionGeometry) -> str | None:
    """Why ``op`` cannot be done for a model of this geometry, or None."""
    return unsupported_by_attention(geometry) if op in OF_HEADS else None
