"""Which backend runs which op, decided once per (op, device) and explainable afterwards.

A backend is a module with one function per op it implements, under the op's own name, and perhaps ``unavailable()``.
``MINIVLLM_KERNELS`` forces an ordered list of backends (for example ``MINIVLLM_KERNELS=reference``); a forced backend that
cannot run is an error, never a silent fallback.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = ["Choice", "KernelUnavailableError", "choose", "explain", "implementation", "why_not"]

ENVIRONMENT_VARIABLE = "MINIVLLM_KERNELS"

# Fastest first. Each names the module that holds the ops and the devices it can serve.
BACKENDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "cpu": ("minivllm_kernels.cpu.ops", ("cpu",)),
    "reference": ("minivllm_kernels.reference", ("cpu", "cuda", "mps", "xpu")),
}


class KernelUnavailableError(RuntimeError):
    """A backend was asked for by name but cannot run the op on this device."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The outcome for one op: the backend that was picked, and why each one before it was not."""

    op: str
    device: str
    backend: str
    function: Callable[..., Any]
    passed_over: tuple[tuple[str, str], ...]


def implementation(op: str, device: str) -> Callable[..., Any]:
    """The function that runs ``op`` on ``device`` (``cpu``, ``cuda``, …)."""
    return choose(op, device).function


def why_not(backend: str, device: str, op: str = "argmax") -> str | None:
    """Why ``backend`` is not to be used on ``device``, or None: for callers that use more of it than single ops."""
    forced = _forced()
    if forced and backend not in forced:
        return f"{ENVIRONMENT_VARIABLE} does not name it"
    reason, function = _probe(backend, op, device)
    return None if function is not None else reason


def explain(device: str = "cpu") -> list[Choice]:
    """The choice for every op on ``device``, in the order of ``minivllm_kernels.OPS``."""
    from minivllm_kernels import OPS

    return [choose(op, device) for op in OPS]


@cache
def choose(op: str, device: str) -> Choice:
    """Pick the first backend that serves ``device``, imports, and has ``op``."""
    forced = _forced()
    passed_over: list[tuple[str, str]] = []
    for name in forced or list(BACKENDS):
        reason, function = _probe(name, op, device)
        if function is not None:
            return Choice(op, device, name, function, tuple(passed_over))
        passed_over.append((name, reason))
    tried = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    remedy = f"unset {ENVIRONMENT_VARIABLE} or add 'reference' to it" if forced else "use a device among cpu, cuda, mps, xpu"
    raise KernelUnavailableError(f"no backend runs {op!r} on {device!r} ({tried}); {remedy}")


def _forced() -> list[str]:
    return [name.strip() for name in os.environ.get(ENVIRONMENT_VARIABLE, "").split(",") if name.strip()]


def _probe(name: str, op: str, device: str) -> tuple[str, Callable[..., Any] | None]:
    if name not in BACKENDS:
        return f"unknown backend, known are {', '.join(BACKENDS)}", None
    module_name, devices = BACKENDS[name]
    if device not in devices:
        return f"serves only {', '.join(devices)}", None
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # a broken optional dependency may raise anything at import
        return f"does not import ({type(error).__name__}: {error})", None
    function = getattr(module, op, None)
    if function is None:
        return "does not have this op", None
    unavailable = getattr(module, "unavailable", None)  # a backend that is built on first use says here that it cannot be
    reason = unavailable() if unavailable is not None else None
    return (reason, None) if reason else ("", function)
