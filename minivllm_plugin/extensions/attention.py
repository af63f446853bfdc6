"""Further backends of the kernel ops, attention above all: for one engine, before or behind the built-in ones.

A backend is a module, or an object, with functions named like the ops of :mod:`minivllm_kernels` and their signatures; it
need not have them all. Which backend runs an op is decided once per engine, said at its start, and never changed in silence.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions.registry import Registry

if TYPE_CHECKING:
    from minivllm_kernels.dispatch import BackendTable

__all__ = ["AttentionBackend", "AttentionBackendRegistry"]

logger = logging.getLogger(__name__)

BUILT_IN = ("cpu", "flash", "triton", "reference", "interpreter")
DEVICES = ("cpu", "cuda", "mps", "xpu")
# What the compiled CPU kernels, which compute whole steps, still call one by one.
AFTER_THE_STEP = ("argmax", "sample", "sample_rows")


@dataclass(frozen=True, slots=True)
class AttentionBackend:
    """One entry.

    Attributes:
        backend: the object, or the name of the module to import at first use.
        before, after: the backend that it stands next to; one of them is None.
    """

    backend: Any
    devices: tuple[str, ...]
    before: str | None
    after: str | None


class AttentionBackendRegistry(Registry[AttentionBackend]):
    """Backend name -> its functions and its place."""

    kind = "kernel backend"

    def add(
        self,
        name: str,
        backend: Any,
        *,
        devices: Collection[str],
        before: str | None = None,
        after: str | None = None,
    ) -> None:
        """Offer ``backend`` for the ops that it has functions for.

        Args:
            name: what ``MINIVLLM_KERNELS`` and ``explain()`` call it.
            backend: module, object, or ``"package.module"``. It may have ``unavailable() -> str | None``: why it cannot run here,
                and ``unsupported(op, geometry) -> str | None``: why it cannot do a model.
            devices: of ``cpu``, ``cuda``, ``mps``, ``xpu``.
            before, after: exactly one of them: a built-in backend (``cpu``: the compiled kernels, ``reference``: plain torch)
                or one that was added earlier. What stands before ``cpu`` is preferred to the compiled kernels, which compute
                whole steps and so are given up for it.

        Raises:
            ConfigError: the name is taken, or an argument is none of these.
        """
        where = f"{self.kind} {name!r} of plugin {self._adding!r}"
        if (before is None) == (after is None):
            raise ConfigError(f"{where} must say either before= or after= which backend it stands, such as before='reference'")
        wrong = [device for device in devices if device not in DEVICES] if not isinstance(devices, str) else [devices]
        if wrong or not devices:
            raise ConfigError(f"{where}: devices must be a list out of {', '.join(DEVICES)}, got {devices!r:.100}")
        if backend is None or (isinstance(backend, str) and not all(part.isidentifier() for part in backend.split("."))):
            raise ConfigError(f"{where} must be a module, an object or a module's name, got {backend!r:.100}")
        if name in BUILT_IN:
            raise ConfigError(f"{where} has the name of a built-in backend; take another")
        neighbour = before or after
        if neighbour not in (*BUILT_IN, *self.names()):
            raise ConfigError(f"{where}: no backend is called {neighbour!r}; known are {', '.join((*BUILT_IN, *self.names()))}")
        self._put(name, AttentionBackend(backend, tuple(devices), before, after))

    def table(self) -> "BackendTable | None":
        """All backends in order, or None if there are only the built-in ones. Make it once per engine: it remembers choices."""
        if not len(self):
            return None
        from minivllm_kernels.dispatch import BackendTable, builtin_backends

        backends = builtin_backends()
        order = list(backends)
        for name, entry in self.items().items():
            neighbour = entry.before or entry.after or ""
            if neighbour not in order:  # its plugin was taken out
                logger.warning("%s is not used: it stands next to %r, which is gone", self.describe(name), neighbour)
                continue
            order.insert(order.index(neighbour) + (entry.before is None), name)
            backends[name] = (entry.backend, entry.devices)
        return BackendTable({name: backends[name] for name in order})

    def instead_of_whole_steps(self, table: "BackendTable | None", device: str) -> str | None:
        """Why the compiled kernels must not compute whole steps: a plugin's backend stands before them. None: they may."""
        if table is None:
            return None
        order = table.order()
        for choice in table.explain(device):
            first = choice.backend in self and choice.op not in AFTER_THE_STEP
            if first and ("cpu" not in order or order.index(choice.backend) < order.index("cpu")):
                return f"{self.describe(choice.backend)} stands before them and computes {choice.op!r}"
        return None

    def report(self, table: "BackendTable | None", device: str) -> None:
        """Log which plugin's backend runs what on ``device``, and which one that should is passed over, and why."""
        if table is None:
            return
        passed_over: dict[str, str] = {}
        for choice in table.explain(device):
            if choice.backend in self:
                logger.info("%s runs on %s", choice.op, self.describe(choice.backend))
            for name, reason in choice.passed_over:
                entry = self.get(name)
                if entry is not None and device in entry.devices and reason != "does not have this op":
                    passed_over[name] = reason
        for name, reason in passed_over.items():
            logger.warning("%s is not used on %s: %s", self.describe(name), device, reason)
