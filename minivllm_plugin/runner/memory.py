"""How much of a CUDA device is left for the KV pool, measured: weights stand in memory already, and the largest batch is tried.

Owns the arithmetic; what computes the batch is passed in. Runs once, on the thread that builds the engine.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from minivllm_plugin.errors import ConfigError

__all__ = ["CudaMemory", "MemoryPlan", "MemoryProbe", "plan_memory"]

GIB = 2**30


class MemoryProbe(Protocol):
    """The memory of one device, in bytes."""

    def total(self) -> int:
        """All of it."""
        ...

    def free(self) -> int:
        """What nobody has taken: no program, and no cache of this one."""
        ...

    def peak_of(self, work: Callable[[], None]) -> int:
        """The most that ``work`` took at a time beyond what was taken before it; all of it is given back afterwards.

        Raises:
            torch.OutOfMemoryError: there is less.
        """
        ...


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where the memory of a device goes, in bytes.

    Attributes:
        total: of the device.
        taken: by weights, by CUDA itself and by other programs.
        batch: by the largest batch.
        graphs: by recorded decode steps, whose memory is their own.
        kept_free: what ``gpu_memory_utilization`` leaves alone.
    """

    total: int
    taken: int
    batch: int
    graphs: int
    kept_free: int

    @property
    def pool(self) -> int:
        """For keys and values; not above 0 when there is no room."""
        return self.total - self.taken - self.batch - self.graphs - self.kept_free

    def __str__(self) -> str:
        parts = (
            (self.taken, "weights and other programs"),
            (self.batch, "the largest batch"),
            (self.graphs, "graphs"),
            (self.kept_free, "kept free"),
        )
        return f"of {self.total / GIB:.1f} GiB: " + ", ".join(f"{size / GIB:.2f} {what}" for size, what in parts)


def plan_memory(
    probe: MemoryProbe,
    utilization: float,
    largest_batch: Callable[[], None],
    decode_batch: Callable[[], None] | None,
    device: str,
) -> MemoryPlan:
    """Measure, once the weights are loaded.

    Args:
        utilization: share of the device that may be used, other programs included.
        largest_batch: computes the most tokens that a step may have.
        decode_batch: computes the most sequences that a graph is recorded for; None where none is recorded.

    Raises:
        ConfigError: the largest batch does not fit, or nothing is left beside it.
    """
    try:
        batch = probe.peak_of(largest_batch)
        graphs = probe.peak_of(decode_batch) if decode_batch is not None else 0
    except torch.OutOfMemoryError as error:
        free = probe.free() / GIB
        raise ConfigError(
            f"the largest batch does not fit the {free:.2f} GiB that are free on {device}; lower max_num_batched_tokens or "
            "max_num_sequences, or take a smaller model"
        ) from error
    total = probe.total()
    plan = MemoryPlan(total, total - probe.free(), batch, graphs, total - int(total * utilization))
    if plan.pool <= 0:
        raise ConfigError(
            f"gpu_memory_utilization={utilization} leaves no memory for the KV pool on {device} ({plan}); raise it, end other "
            "programs there, or lower max_num_batched_tokens or max_num_sequences"
        )
    return plan


class CudaMemory:
    """The memory of a CUDA device, by torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total(self) -> int:
        return int(torch.cuda.mem_get_info(self._device)[1])

    def free(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def peak_of(self, work: Callable[[], None]) -> int:
        before = self.free()
        torch.cuda.reset_peak_memory_stats(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        work()
        torch.cuda.synchronize(self._device)
        taken = torch.cuda.max_memory_reserved(self._device) - reserved
        # What stays, workspaces of libraries for instance, is in free() from now on.
        return max(0, taken - max(0, before - self.free()))
