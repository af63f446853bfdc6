"""Host memory that a device copies from or to without waiting: pinned where the device is a GPU, plain on a CPU.

A buffer knows whether its last copy is done; nobody writes over what is still being read. Used on the engine thread.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["ALIGNMENT", "HostBuffer", "Section", "on_device", "pack"]

ALIGNMENT = 64  # bytes: kernels load 16 at once from addresses that are known to be multiples of 16


class Section(NamedTuple):
    """A tensor inside a buffer of bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def end(self) -> int:
        """First byte after it."""
        return self.offset + prod(self.shape) * self.dtype.itemsize

    def of(self, memory: Tensor) -> Tensor:
        """The view of ``memory``, uint8 ``[n]``."""
        return memory[self.offset : self.end].view(self.dtype).view(self.shape)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Kernels of ours are launched on the thread's current CUDA device: make it ``device`` for a while."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def pack(parts: Sequence[tuple[str, torch.dtype, tuple[int, ...]]]) -> tuple[Section, ...]:
    """Places for tensors in one buffer, in the given order, each at a multiple of ``ALIGNMENT``."""
    sections: list[Section] = []
    offset = 0
    for name, dtype, shape in parts:
        section = Section(name, dtype, shape, offset)
        sections.append(section)
        offset = -(-section.end // ALIGNMENT) * ALIGNMENT
    return tuple(sections)


class HostBuffer:
    """Bytes on the host, for copies from and to ``device``.

    Attributes:
        memory: uint8 ``[num_bytes]``.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self._is_asynchronous = device.type == "cuda"
        self.memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._is_asynchronous)
        self._done: Any = torch.cuda.Event() if self._is_asynchronous else None  # type: ignore[no-untyped-call]  # of torch

    def send(self, target: Tensor, num_bytes: int) -> None:
        """Copy the first ``num_bytes`` to ``target``, uint8 on the device, behind what was launched before."""
        target[:num_bytes].copy_(self.memory[:num_bytes], non_blocking=True)
        self._record()

    def receive(self, source: Tensor) -> Tensor:
        """Begin to copy ``source`` here; its values stand in the tensor that is returned after :meth:`wait`."""
        target = self.memory[: source.nbytes].view(source.dtype).view(source.shape)
        target.copy_(source, non_blocking=True)
        self._record()
        return target

    def wait(self) -> None:
        """Return when the last copy is done."""
        if self._done is not None:
            self._done.synchronize()  # at once where nothing was recorded; without the GIL

    def _record(self) -> None:
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))  # of that device: the thread's may be another
