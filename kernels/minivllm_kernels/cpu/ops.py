"""Ops of the public list on the compiled library, over torch tensors. A whole step goes through ``decoder.py`` instead."""

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from minivllm_kernels.cpu.build import wanted_isa
from minivllm_kernels.cpu.library import Draw, kernel_library
from minivllm_kernels.dispatch import KernelUnavailableError
from minivllm_kernels.draws import TokenDraw

__all__ = ["argmax", "sample", "unavailable"]


@cache  # a build that fails would fail again, and take as long
def unavailable() -> str | None:
    """Why this backend is not to be used here, or None. Builds the library when it is not there yet."""
    try:
        library = kernel_library()
    except KernelUnavailableError as error:
        return str(error)
    if library.minivllm_isa() == b"scalar" and wanted_isa() != "scalar":
        return "this processor has neither AVX2 nor NEON, and plain torch is faster than plain C"
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


def sample(logits: Tensor, draws: Sequence[TokenDraw]) -> Tensor:
    """See :func:`minivllm_kernels.sample`."""
    wide = logits if logits.dtype == torch.float32 and logits.stride(1) == 1 else logits.float().contiguous()
    rows = (Draw * len(draws))(*(Draw(d.uniform, d.temperature, d.top_p, d.min_p, d.top_k) for d in draws))
    tokens = torch.empty(len(draws), dtype=torch.int64)
    kernel_library().minivllm_sample(
        wide.data_ptr(), wide.shape[0], wide.shape[1], wide.stride(0), rows, tokens.data_ptr(), torch.get_num_threads()
    )
    return tokens
