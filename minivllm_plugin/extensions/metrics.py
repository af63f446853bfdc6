"""Metrics that plugins add: a name and a function of the engine's state, asked when somebody collects.

Collecting may happen on any thread; a metric that fails is left out and logged once. Knows no exporter.
"""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions.registry import Registry
from minivllm_plugin.views import EngineState

__all__ = ["Metric", "MetricRegistry", "MetricSource"]

logger = logging.getLogger(__name__)

MetricKind = Literal["gauge", "counter"]

NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")  # what Prometheus takes


class Metric(NamedTuple):
    """One value at the moment of collection."""

    name: str
    kind: MetricKind
    documentation: str
    value: float


@dataclass(frozen=True, slots=True)
class MetricSource:
    """Where a metric comes from."""

    kind: MetricKind
    documentation: str
    function: Callable[[EngineState], float]


class MetricRegistry(Registry[MetricSource]):
    """Metric name -> where it comes from."""

    kind = "metric"

    def __init__(self) -> None:
        super().__init__()
        self._failed: set[str] = set()

    def gauge(self, name: str, documentation: str, function: Callable[[EngineState], float]) -> None:
        """A value that goes up and down.

        Args:
            name: as Prometheus takes it, for example ``acme_tenants``.
            documentation: one sentence, with the unit.
            function: asked at every collection, on the collecting thread: it must be quick, and may be asked by two at once.

        Raises:
            ConfigError: the name is taken, or is none that Prometheus takes.
        """
        self._add(name, "gauge", documentation, function)

    def counter(self, name: str, documentation: str, function: Callable[[EngineState], float]) -> None:
        """A value that only grows. Otherwise as :meth:`gauge`."""
        self._add(name, "counter", documentation, function)

    def collect(self, state: EngineState) -> list[Metric]:
        """Every metric's value now, in the order in which they were added. Never raises."""
        collected: list[Metric] = []
        for name, source in self.items().items():
            try:
                value = float(source.function(state))
            except Exception as error:  # a plugin's own code
                if name not in self._failed:
                    self._failed.add(name)
                    logger.warning("%s failed and is left out while it does: %r", self.describe(name), error, exc_info=error)
                continue
            collected.append(Metric(name, source.kind, source.documentation, value))
        return collected

    def _add(self, name: str, kind: MetricKind, documentation: str, function: Callable[[EngineState], float]) -> None:
        if isinstance(name, str) and not NAME.fullmatch(name):
            raise ConfigError(f"metric name {name!r:.100} must be letters, digits, '_' and ':', and begin with no digit")
        if not callable(function):
            raise ConfigError(f"metric {name!r} must come with a function of EngineState, got {function!r:.100}")
        self._put(name, MetricSource(kind, documentation, function))
