"""All ranks of a tensor-parallel model in one process: a thread each, and collectives that go through a list.

The sum over the ranks is an op of torch's, as it is on a device: what records ops records it, and a replay asks the others.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor

from minivllm_plugin.parallel.context import ParallelContext

__all__ = ["recording", "run_world"]

T = TypeVar("T")
PATIENCE = 60.0


_numbers = itertools.count()
_worlds: dict[int, "_World"] = {}


_here = threading.local()


@contextmanager
def recording() -> Iterator[None]:
    """As during a device's capture: a sum is noted, and nobody is asked for anything."""
    _here.is_recording = True
    try:
        yield
    finally:
        _here.is_recording = False


@torch.library.custom_op("simulated_world::all_reduce", mutates_args=())
def _all_reduce(x: Tensor, world: int, rank: int) -> Tensor:
    if getattr(_here, "is_recording", False):
        return torch.full_like(x, torch.nan)
    return torch.stack(_worlds[world].exchange(rank, x)).sum(dim=0)


class _World:
    def __init__(self, size: int) -> None:
        self.number = next(_numbers)
        self.places: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self.places[rank] = x.clone()
        self.barrier.wait(PATIENCE)
        found = [place for place in self.places if place is not None]
        self.barrier.wait(PATIENCE)  # nobody goes on to the next exchange before everybody has read this one
        assert len({place.shape for place in found}) == 1
        return found


class _Group:
    def __init__(self, world: _World, rank: int) -> None:
        self._world, self._rank = world, rank

    def all_reduce(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.simulated_world.all_reduce(x, self._world.number, self._rank)
        return out

    def gather(self, x: Tensor) -> list[Tensor] | None:
        parts = self._world.exchange(self._rank, x)
        return parts if self._rank == 0 else None


def run_world(size: int, work: Callable[[ParallelContext], T]) -> list[T]:
    """What ``work`` returns on each rank, run side by side. The first failure is raised."""
    world = _World(size)
    _worlds[world.number] = world

    def one(rank: int) -> T:
        try:
            with torch.inference_mode():
                return work(ParallelContext(rank, size, _Group(world, rank) if size > 1 else None))
        except BaseException:
            world.barrier.abort()
            raise

    try:
        with ThreadPoolExecutor(size) as pool:
            futures = [pool.submit(one, rank) for rank in range(size)]
            failures = [failure for future in futures if (failure := future.exception()) is not None]
            for failure in sorted(failures, key=lambda failure: isinstance(failure, threading.BrokenBarrierError)):
                raise failure
            return [future.result() for future in futures]
    finally:
        del _worlds[world.number]
