"""What is needed of a device that records launches and plays them back, the sizes worth recording, and CUDA's own.

A recorded graph reads and writes the memory it saw, with the host's numbers of that moment. So everything that differs from
replay to replay must stand in tensors that never move.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any, Protocol

import torch

__all__ = ["CudaGraphApi", "Graph", "GraphApi", "graph_sizes", "size_for"]


class Graph(Protocol):
    """Recorded launches."""

    def replay(self) -> None:
        """Launch them again, behind what was launched before."""
        ...


class GraphApi(Protocol):
    """Records what is launched on one device."""

    def pool(self) -> Any:
        """A handle of memory that several graphs share, since no two of them run at once."""
        ...

    def capture(self, pool: Any) -> AbstractContextManager[Graph]:
        """What is launched inside is recorded, not run; whatever waits for the device there is refused."""
        ...


class CudaGraphApi:
    """CUDA's graphs, by torch.

    Args:
        device: where the engine runs.
    """

    # Of the process, like what it guards: torch allows one capture at a time, and begins each with a wait for the whole device,
    # which would spoil that of another engine.
    _one_at_a_time = Lock()

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def capture(self, pool: Any) -> Iterator[Graph]:
        self._stream = self._stream or torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # of torch
        graph = torch.cuda.CUDAGraph()
        usual = torch.cuda.current_stream(self._device)
        try:
            # thread_local: the user's program may do what it likes on its own threads meanwhile, but for waiting for the device.
            with (
                self._one_at_a_time,
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                yield graph
        except BaseException:
            torch.cuda.set_stream(usual)  # where a capture cannot be ended, torch leaves its own stream the current one
            raise


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes to capture, up to ``largest`` and including it: 1, 2, 4, 8, then steps of an eighth to a quarter.

    A batch runs padded to the next size. Padding costs little, since a decode step reads all weights whatever its size, and
    every further size costs a capture.
    """
    sizes = [1, 2, 4]
    step = 8
    while sizes[-1] + step < largest:
        step = 8 if sizes[-1] < 32 else 16 if sizes[-1] < 128 else 32 if sizes[-1] < 256 else 64
        sizes.append((sizes[-1] // step + 1) * step)
    return tuple(sorted({*(size for size in sizes if size < largest), largest}))


def size_for(batch: int, sizes: tuple[int, ...]) -> int | None:
    """The smallest of ``sizes``, ascending, that holds ``batch`` rows; None when there is none."""
    return next((size for size in sizes if size >= batch), None)
