"""How much of the time a device has nothing to do, by torch's profiler: gaps between kernels, copies and graph nodes."""

from collections.abc import Callable, Iterable

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

__all__ = ["covered", "idle_share"]


def idle_share(step: Callable[[], object], count: int, device: str) -> tuple[float | None, str]:
    """Share of the time from the first to the last thing the device did in ``count`` steps in which it did nothing, and why it is
    not known, where it is not. The profiler slows the host down, so that the truth is at most this."""
    if device != "cuda":
        for _ in range(count):
            step()
        return None, "there is no device"
    try:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(count):
                step()
            torch.cuda.synchronize()
        spans = [
            (event.time_range.start, event.time_range.end)
            for event in profiler.events() or ()
            if event.device_type == DeviceType.CUDA
        ]
    except Exception as error:  # no CUPTI, or no right to use it
        return None, f"the profiler does not work here ({type(error).__name__}: {error!s:.200})"
    if not spans:
        return None, "the profiler saw nothing on the device"
    whole = max(end for _, end in spans) - min(start for start, _ in spans)
    return (1 - covered(spans) / whole if whole else 0.0), ""


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of spans (start, end)."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        if end > reached:
            total += end - max(start, reached)
            reached = end
    return total
