"""What every wrapper needs to launch: the compiler options, whether kernels are compiled at all, sizes of blocks, and checks.

Wrappers run on the engine thread, with the tensors' device current, and may be inside the capture of a CUDA graph: they look
at shapes, strides and dtypes only, never at values.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

__all__ = ["COMPILER_OPTIONS", "FLOATS", "check_floats", "check_rows", "interpreting", "next_power_of_2"]

# Multiply-adds may be fused. Said at each launch, because Triton 3.9 warns where it is left open and 3.10 turns it off.
COMPILER_OPTIONS = {"enable_fp_fusion": True}

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def interpreting() -> bool:
    """Whether kernels run on the CPU, in Triton's interpreter: TRITON_INTERPRET was set when triton was first imported."""
    return not isinstance(tl.cdiv, JITFunction)


def next_power_of_2(size: int) -> int:
    """The least power of two that is not below ``size``; 1 for 0. Triton's vectors have such lengths only."""
    return 1 << max(size - 1, 0).bit_length()


def check_floats(op: str, **tensors: Tensor) -> None:
    """All of one dtype out of :data:`FLOATS`, else a ValueError that names the op and the tensors."""
    dtypes = {tensor.dtype for tensor in tensors.values()}
    if len(dtypes) > 1 or not dtypes <= set(FLOATS):
        seen = ", ".join(f"{name} {tensor.dtype}" for name, tensor in tensors.items())
        raise ValueError(f"{op}: {seen}; the kernel takes one dtype out of float32, bfloat16 and float16 for all of them")


def check_rows(op: str, **tensors: Tensor) -> None:
    """The last dimension is contiguous, else a ValueError. The other strides may be anything."""
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(f"{op}: {name} has strides {tuple(tensor.stride())}; the last must be 1, call .contiguous()")
