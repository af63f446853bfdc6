"""Ops of the public list on the compiled library, over torch tensors. A whole step goes through ``decoder.py`` instead."""

import torch
from torch import Tensor

from minivllm_kernels.cpu.library import kernel_library
from minivllm_kernels.dispatch import KernelUnavailableError

__all__ = ["argmax", "unavailable"]


def unavailable() -> str | None:
    """Why this backend cannot run here, or None. Builds the library when it is not there yet."""
    try:
        kernel_library()
    except KernelUnavailableError as error:
        return str(error)
    return None


def argmax(logits: Tensor) -> Tensor:
    """See :func:`minivllm_kernels.argmax`; float32 rows of any stride, a NaN counts as the largest."""
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        return logits.argmax(dim=-1)
    best = torch.empty(logits.shape[0], dtype=torch.int64)
    kernel_library().minivllm_argmax(
        logits.data_ptr(), logits.shape[0], logits.shape[1], logits.stride(0), best.data_ptr(), torch.get_num_threads()
    )
    return best
