"""The collectives over torch.distributed's backends: nccl between GPUs, gloo between CPU processes of this machine.

A group of its own for every engine, never the process-wide default one: two engines in a process do not meet. Ranks find each
other through a file in a directory that only this user can enter, and gloo talks over the loopback interface, on ports that
the system chooses. Used on the thread that runs the model, except :meth:`ProcessGroup.abort`.
"""

import datetime
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.parallel.context import LostPeerError

__all__ = ["PATIENCE", "ProcessGroup", "backend_for", "refuse_without_backend"]

_c10d: Any = dist  # torch's stubs know neither all of its classes nor the options that they have had since 2.5

# A rank that is alive but stands still fails the others after this time. Loading is not waited for in a collective.
PATIENCE = datetime.timedelta(minutes=5)
LOOPBACK = "127.0.0.1"
# By default a lost peer has nccl's watchdogs end the process, which here is the user's own. 2: the communicator is aborted, and
# whoever waits goes on to fail.
NCCL_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2", "TORCH_NCCL_ENABLE_MONITORING": "0"}


def backend_for(device: torch.device) -> str:
    """``nccl`` or ``gloo``."""
    return "nccl" if device.type == "cuda" else "gloo"


def refuse_without_backend(backend: str) -> None:
    """
    Raises:
        ConfigError: this torch was built without ``backend``.
    """
    available = dist.is_available() and (dist.is_nccl_available() if backend == "nccl" else dist.is_gloo_available())
    if not available:
        raise ConfigError(
            f"tensor_parallel_size above 1 needs torch.distributed with {backend}, which this torch ({torch.__version__}) "
            "was built without; install another build, or leave tensor_parallel_size at 1"
        )


class ProcessGroup:
    """A :class:`minivllm_plugin.parallel.context.Group` of processes.

    Args:
        rendezvous: a path that all ranks of this engine share and nobody else knows; the file must not exist before.

    Raises:
        LostPeerError: not everybody came.
    """

    def __init__(self, backend: str, rendezvous: Path, rank: int, size: int, device: torch.device) -> None:
        self._rank, self._size, self._device = rank, size, device
        self._is_nccl = backend == "nccl"
        store = _c10d.FileStore(str(rendezvous), size)
        try:
            self._group = _nccl(store, rank, size) if self._is_nccl else _gloo(store, rank, size)
            # nccl connects at the first collective, which may be inside a graph's capture if it is not made here.
            self.all_reduce(torch.zeros(1, device=device))
            if self._is_nccl:
                torch.cuda.synchronize(device)
        except RuntimeError as error:
            raise LostPeerError(f"rank {rank} of {size} could not join the others: {error}") from error

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._finish(self._group.allreduce([x]))
        return x

    def gather(self, x: Tensor) -> list[Tensor] | None:
        x = x.contiguous()
        options = _c10d.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self._size)] if self._rank == 0 else []
        self._finish(self._group.gather([parts] if parts else [], [x], options))
        return parts or None

    def abort(self) -> None:
        """Have a collective that is under way fail, on whatever thread waits for it. gloo notices lost peers by itself."""
        if self._is_nccl:
            self._group.abort()

    def _finish(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise LostPeerError(f"rank {self._rank} of {self._size} lost the others: {error}") from error


def _gloo(store: Any, rank: int, size: int) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = PATIENCE
    options._threads = 1  # one collective at a time
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    return _c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int) -> Any:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = PATIENCE
    with _environment(NCCL_SETTINGS):
        return _c10d.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _environment(settings: Mapping[str, str]) -> Iterator[None]:
    """With these variables, which are read by what is constructed inside; afterwards as it was."""
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
