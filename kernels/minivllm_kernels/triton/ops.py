"""The ops of the Triton backend, under their public names, for CUDA devices."""

import torch

from minivllm_kernels.triton.launch import interpreting
from minivllm_kernels.triton.silu_and_mul import silu_and_mul

__all__ = ["silu_and_mul", "unavailable"]


def unavailable() -> str | None:
    """Why these kernels cannot run on a device here, or None. Where triton is missing, this module does not import."""
    if interpreting():
        return "TRITON_INTERPRET is set: kernels would run in the interpreter, on the CPU; unset it"
    if not torch.cuda.is_available():
        return "no CUDA device is available to torch"
    return None
