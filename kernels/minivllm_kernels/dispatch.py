"""Which backend runs which op, decided once per (op, device) and explainable afterwards.

A backend is a module with one function per op it implements, under the op's own name. It may have ``unavailable()``, which says
why it cannot be used on this machine, or None, and ``unsupported(op, geometry)``, which says why it cannot do an op for models of
this :class:`~minivllm_kernels.metadata.AttentionGeometry`, or None. The first is asked at every choice, the second only in a
table that was made for a geometry (:func:`fitted`): once, when a model is loaded, and never in the middle of a pass.
``MINIVLLM_KERNELS`` forces an ordered list of backends (for example ``MINIVLLM_KERNELS=reference``); a forced backend that
cannot run is an error, never a silent fallback.

The built-in backends serve the whole process. An engine with further ones has a :class:`BackendTable` of its own, which holds
inside ``with using(table)`` on that thread and nowhere else.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minivllm_kernels.metadata import AttentionGeometry

__all__ = [
    "BackendTable",
    "Choice",
    "KernelUnavailableError",
    "builtin_backends",
    "choose",
    "explain",
    "fitted",
    "implementation",
    "using",
    "why_not",
]

ENVIRONMENT_VARIABLE = "MINIVLLM_KERNELS"

Backends = Mapping[str, tuple[Any, tuple[str, ...]]]

# Fastest first. Each names the module that holds the ops (or is it, or an object like it) and the devices it can serve.
BACKENDS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "cpu": ("minivllm_kernels.cpu.ops", ("cpu",)),
    "flash": ("minivllm_kernels.flash", ("cuda",)),
    "triton": ("minivllm_kernels.triton.ops", ("cuda",)),
    "reference": ("minivllm_kernels.reference", ("cpu", "cuda", "mps", "xpu")),
    "interpreter": ("minivllm_kernels.triton.interpreted", ("cpu",)),  # behind the reference: used only where it is forced
}

# An op that does the work of others is taken from a backend only where these come from it as well: whoever brings a cache layout
# of their own has a store_kv that must not be passed by. The reference composes it of whatever ops were chosen.
FUSED: dict[str, tuple[str, ...]] = {
    "norm_rotary_store": ("rms_norm", "rotary", "store_kv"),
    "sample_rows": ("argmax", "sample"),
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


class BackendTable:
    """Backends in the order in which they are tried, and what was chosen among them.

    Args:
        backends: name -> (module, its name, or any object with functions named like the ops; devices it serves). An object
            may have ``unavailable()`` and ``unsupported(op, geometry)``, see the top of this module.
        geometry: of the model that it is for; None: no backend is asked whether it can do the model.
    """

    def __init__(self, backends: Backends, geometry: "AttentionGeometry | None" = None) -> None:
        self.backends = dict(backends)
        self.geometry = geometry
        self._choices: dict[tuple[str, str], Choice] = {}

    def choose(self, op: str, device: str) -> Choice:
        """As :func:`choose`, among these backends."""
        found = self._choices.get((op, device))
        if found is None:
            found = self._choices[op, device] = _pick(op, device, self.backends, self.geometry)
        return found

    def explain(self, device: str = "cpu") -> list[Choice]:
        """As :func:`explain`, among these backends."""
        from minivllm_kernels import OPS

        return [self.choose(op, device) for op in OPS]

    def order(self) -> list[str]:
        """Names in the order in which they are tried: ``MINIVLLM_KERNELS`` if it is set, else our own."""
        return _forced() or list(self.backends)


_in_use: ContextVar[BackendTable | None] = ContextVar("minivllm_backends", default=None)


class using:  # noqa: N801  # reads as a statement: with using(table)
    """Ops called inside the block, on this thread, are chosen from ``table``; None is the built-in backends."""

    __slots__ = ("_table", "_token")

    def __init__(self, table: BackendTable | None) -> None:
        self._table = table

    def __enter__(self) -> None:
        self._token: Token[BackendTable | None] = _in_use.set(self._table)

    def __exit__(self, *exception: object) -> None:
        _in_use.reset(self._token)


def implementation(op: str, device: str) -> Callable[..., Any]:
    """The function that runs ``op`` on ``device`` (``cpu``, ``cuda``, …)."""
    table = _in_use.get()
    return (choose(op, device) if table is None else table.choose(op, device)).function


def builtin_backends() -> dict[str, tuple[Any, tuple[str, ...]]]:
    """A copy of the table of the process: what a further backend is put before or after."""
    return dict(BACKENDS)


def why_not(backend: str, device: str, op: str = "argmax") -> str | None:
    """Why ``backend`` is not to be used on ``device``, or None: for callers that use more of it than single ops."""
    forced = _forced()
    if forced and backend not in forced:
        return f"{ENVIRONMENT_VARIABLE} does not name it"
    reason, function = _probe(backend, op, device, BACKENDS)
    return None if function is not None else reason


def explain(device: str = "cpu", geometry: "AttentionGeometry | None" = None) -> list[Choice]:
    """The choice for every op on ``device``, in the order of ``minivllm_kernels.OPS``; with ``geometry``, for such a model."""
    from minivllm_kernels import OPS

    if geometry is not None:
        return fitted(geometry).explain(device)
    return [choose(op, device) for op in OPS]


def fitted(geometry: "AttentionGeometry", table: BackendTable | None = None) -> BackendTable:
    """The backends of ``table``, or the built-in ones, without those that cannot do a model of this geometry.

    Whoever loads a model makes one, computes inside ``with using(it)``, and can have it ``explain()`` what was passed over.
    """
    return BackendTable(builtin_backends() if table is None else table.backends, geometry)


@cache
def choose(op: str, device: str) -> Choice:
    """Pick the first built-in backend that serves ``device``, imports, and has ``op``."""
    return _pick(op, device, BACKENDS)


def _pick(op: str, device: str, backends: Backends, geometry: "AttentionGeometry | None" = None) -> Choice:
    forced = _forced()
    passed_over: list[tuple[str, str]] = []
    for name in forced or list(backends):
        reason, function = _probe(name, op, device, backends, geometry)
        if function is not None and name != "reference" and op in FUSED:
            others = {part: _pick(part, device, backends, geometry).backend for part in FUSED[op]}
            foreign = [f"{part} is {other}'s" for part, other in others.items() if other != name]
            reason, function = (", ".join(foreign), None) if foreign else ("", function)
        if function is not None:
            return Choice(op, device, name, function, tuple(passed_over))
        passed_over.append((name, reason))
    tried = "; ".join(f"{name}: {reason}" for name, reason in passed_over)
    remedy = f"unset {ENVIRONMENT_VARIABLE} or add 'reference' to it" if forced else "use a device among cpu, cuda, mps, xpu"
    raise KernelUnavailableError(f"no backend runs {op!r} on {device!r} ({tried}); {remedy}")


def _forced() -> list[str]:
    return [name.strip() for name in os.environ.get(ENVIRONMENT_VARIABLE, "").split(",") if name.strip()]


def _probe(
    name: str, op: str, device: str, backends: Backends, geometry: "AttentionGeometry | None" = None
) -> tuple[str, Callable[..., Any] | None]:
    if name not in backends:
        return f"unknown backend, known are {', '.join(backends)}", None
    module, devices = backends[name]
    if device not in devices:
        return f"serves only {', '.join(devices)}", None
    try:
        if isinstance(module, str):
            module = importlib.import_module(module)
    except Exception as error:  # a broken optional dependency may raise anything at import
        return f"does not import ({type(error).__name__}: {error})", None
    function = getattr(module, op, None)
    if function is None:
        return "does not have this op", None
    reason = _asked(module, "unavailable")  # one that is built on first use says here that it cannot be
    if reason is None and geometry is not None:
        reason = _asked(module, "unsupported", op, geometry)
    return (reason, None) if reason else ("", function)


def _asked(module: Any, question: str, *arguments: Any) -> str | None:
    """What the backend says for a reason against itself, or None."""
    function = getattr(module, question, None)
    try:
        return None if function is None else function(*arguments)
    except Exception as error:  # a plugin's, perhaps
        return f"its {question}() failed ({type(error).__name__}: {error})"
