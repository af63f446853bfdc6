"""The engines' series beside LiteLLM's own under the proxy's ``/metrics``. Imports prometheus_client.

LiteLLM renders prometheus_client's process-wide registry; one collector of ours stands there for all engines, because a page with
two families of one name cannot be read. On the engine thread it only counts; the rest happens on the scraping thread.
"""

from collections.abc import Iterable, Sequence

from prometheus_client import REGISTRY
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from minivllm_plugin.events import RequestOutcome, StepReport
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins.facade import ConfigDraft, EngineHandle
from minivllm_plugin.plugins.first_party.prometheus import PrometheusMetrics
from minivllm_plugin.views import EngineState, RequestView

__all__ = ["AllEngines", "EngineMetrics"]


class EngineMetrics:
    """A plugin that keeps the metrics of one model over the engines that serve it one after the other.

    A first-party :class:`PrometheusMetrics` belongs to one engine; when that has died, the next call starts another with the same
    options. Its counters begin at zero, as those of a restarted server do.

    Args:
        model_name: the label ``model_name``.
    """

    minivllm_name = "proxy-metrics"

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._next: PrometheusMetrics | None = None
        self._now: PrometheusMetrics | None = None

    def families(self) -> Iterable[Family]:
        """What the latest engine says now; nothing before there was one."""
        return () if self._now is None else self._now.registry.collect()

    @hookimpl
    def minivllm_configure(self, config: ConfigDraft) -> None:
        self._next = PrometheusMetrics(model_name=self._model_name)
        self._next.minivllm_configure(config)

    @hookimpl
    def minivllm_engine_started(self, engine: EngineHandle) -> None:
        if self._next is not None:
            self._next.minivllm_engine_started(engine)
            self._now, self._next = self._next, None

    @hookimpl
    def minivllm_request_queued(self, request: RequestView, state: EngineState) -> None:
        if self._now is not None:
            self._now.minivllm_request_queued(request, state)

    @hookimpl
    def minivllm_step_finished(self, report: StepReport) -> None:
        if self._now is not None:
            self._now.minivllm_step_finished(report)

    @hookimpl
    def minivllm_request_finished(self, request: RequestView, outcome: RequestOutcome) -> None:
        if self._now is not None:
            self._now.minivllm_request_finished(request, outcome)

    @hookimpl
    def minivllm_engine_stopped(self, engine: EngineHandle, error: BaseException | None) -> None:
        if self._now is not None:
            self._now.minivllm_engine_stopped(engine, error)


class AllEngines(Collector):
    """The families of several engines, each name once. In LiteLLM's registry from :meth:`register` to :meth:`unregister`."""

    def __init__(self, engines: Sequence[EngineMetrics]) -> None:
        self._engines = engines

    def register(self) -> None:
        """
        Raises:
            ValueError: the registry has series of these names already.
        """
        REGISTRY.register(self)

    def unregister(self) -> None:
        REGISTRY.unregister(self)

    def describe(self) -> Iterable[Family]:
        """Nothing beforehand: without this, registering would collect from engines that are not there yet."""
        return ()

    def collect(self) -> Iterable[Family]:
        families: dict[str, Family] = {}
        for engine in self._engines:
            for family in engine.families():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        return families.values()
