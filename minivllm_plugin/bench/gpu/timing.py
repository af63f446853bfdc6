"""How long something takes on a device: CUDA's own events, or the clock on a CPU."""

import time
from collections.abc import Callable

import torch

from minivllm_plugin.bench.report import median

__all__ = ["seconds_on", "synchronise"]


def seconds_on(device: str, call: Callable[[], object], repeats: int = 10) -> float:
    """Median seconds of one call out of ``repeats``, after three that are not counted."""
    for _ in range(3):
        call()
    synchronise(device)
    taken = []
    for _ in range(repeats):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]  # of torch
            start.record()
            call()
            end.record()
            end.synchronize()
            taken.append(start.elapsed_time(end) / 1e3)
        else:
            began = time.perf_counter()
            call()
            taken.append(time.perf_counter() - began)
    return median(taken)


def synchronise(device: str) -> None:
    """Wait until the device has done all it was given."""
    if device == "cuda":
        torch.cuda.synchronize()
