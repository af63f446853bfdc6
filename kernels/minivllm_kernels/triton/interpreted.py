"""The Triton kernels on the CPU, in Triton's interpreter: what proves them without a GPU. Only ever used when it is forced.

``TRITON_INTERPRET=1 MINIVLLM_KERNELS=interpreter,reference`` runs a model through them, thousands of times slower than plain
torch. The ops are those of :mod:`minivllm_kernels.triton.ops`, whichever they are.
"""

from typing import Any

from minivllm_kernels.triton import ops
from minivllm_kernels.triton.launch import interpreting

__all__ = ["unavailable"]


def unavailable() -> str | None:
    """Why kernels cannot be interpreted in this process, or None."""
    if not interpreting():
        return "triton was imported without TRITON_INTERPRET=1; set it before the process starts"
    return None


def __getattr__(name: str) -> Any:
    return getattr(ops, name)
