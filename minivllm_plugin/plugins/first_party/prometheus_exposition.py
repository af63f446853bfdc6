"""An engine's numbers as Prometheus metric families, and the server that shows them. Imports prometheus_client.

Loaded only by :class:`~minivllm_plugin.plugins.first_party.prometheus.PrometheusMetrics`. Everything here runs when somebody
scrapes, on the scraping thread.
"""

import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from minivllm_plugin.engine.snapshot import EngineSnapshot
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions.metrics import Metric
from minivllm_plugin.plugins.facade import HookTotals
from minivllm_plugin.plugins.first_party.request_metrics import Histogram, RequestMetrics
from minivllm_plugin.views import EngineState

__all__ = ["EngineCollector", "MetricsServer", "Reading"]

logger = logging.getLogger(__name__)

PREFIX = "minivllm:"


class Reading:
    """What a collection asks the engine for, at that moment.

    Args:
        model_name: the label.
        requests: gathered by the observer.
        snapshot, metrics, totals: of the engine's handle.
    """

    def __init__(
        self,
        model_name: str,
        requests: RequestMetrics,
        snapshot: Callable[[], EngineSnapshot | None] = lambda: None,
        metrics: Callable[[], list[Metric]] = list,
        totals: Callable[[], list[HookTotals]] = list,
    ) -> None:
        self.model_name = model_name
        self.requests = requests
        self.snapshot = snapshot
        self.metrics = metrics
        self.totals = totals

    def frozen(self) -> "Reading":
        """The same, as of now and for ever: what is left when the engine has stopped."""
        snapshot, metrics, totals = self.snapshot(), self.metrics(), self.totals()
        return Reading(self.model_name, self.requests, lambda: snapshot, lambda: metrics, lambda: totals)


class EngineCollector(Collector):
    """Metric families of one engine, built at each collection.

    Args:
        reading: replaced when the engine starts and when it stops.
        is_running: False makes the gauges of live requests and held blocks zero.
    """

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.is_running = False
        self._clashes: set[str] = set()

    def collect(self) -> Iterator[Family]:
        reading, names = self.reading, set[str]()
        for family in (*self._of_the_engine(reading), *_of_requests(reading), *_of_plugins(reading)):
            names.add(family.name)
            yield family
        yield from self._of_other_plugins(reading, names)

    def _of_the_engine(self, reading: Reading) -> Iterator[Family]:
        snapshot = reading.snapshot()
        state = _newest(None if snapshot is None else snapshot.state, reading.requests.latest)
        model = reading.model_name
        alive = state if self.is_running else None
        running = 0 if alive is None else alive.num_running
        waiting = 0 if alive is None else alive.num_waiting
        usage = 0.0 if alive is None else alive.num_used_blocks / alive.num_blocks
        yield _gauge("num_requests_running", "Requests that run.", model, running)
        yield _gauge("num_requests_waiting", "Requests that wait, preempted ones among them.", model, waiting)
        yield _gauge("kv_cache_usage_perc", "Share of the KV blocks that requests hold; 1 is all of them.", model, usage)
        if state is not None:
            info = GaugeMetricFamily(
                f"{PREFIX}cache_config_info",
                "Geometry of the KV pool; always 1.",
                labels=["model_name", "block_size", "num_gpu_blocks"],
            )
            info.add_metric([model, str(state.block_size), str(state.num_blocks)], 1)
            yield info
        yield _counter("num_preemptions", "Preemptions.", model, state.num_preemptions if state is not None else 0)
        yield from _of_the_snapshot(snapshot, model)

    def _of_other_plugins(self, reading: Reading, names: set[str]) -> Iterator[Family]:
        for metric in reading.metrics():
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family: Family = make(metric.name, metric.documentation, labels=["model_name"])
            if family.name in names:  # two families of one name make the whole page unreadable
                if metric.name not in self._clashes:
                    self._clashes.add(metric.name)
                    logger.warning("metric %r of a plugin is left out: the name is taken; rename it", metric.name)
                continue
            names.add(family.name)
            family.add_metric([reading.model_name], metric.value)  # type: ignore[attr-defined]  # both kinds have it
            yield family


COUNTED = {  # metric -> what counts it in the snapshot, and what it means
    "prefix_cache_queries": ("prefix_queried_tokens", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_hit_tokens", "Tokens found in the prefix cache."),
    "spec_decode_num_draft_tokens": ("num_drafted_tokens", "Tokens guessed by prompt lookup."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens", "Guessed tokens that came true."),
    "graph_replays": ("num_graph_replays", "Steps replayed from a recorded CUDA graph."),
}


def _of_the_snapshot(snapshot: EngineSnapshot | None, model: str) -> Iterator[Family]:
    for name, (field, documentation) in COUNTED.items():
        yield _counter(name, documentation, model, getattr(snapshot, field, 0))
    eager = CounterMetricFamily(f"{PREFIX}eager_steps", "Steps launched op by op.", labels=["model_name", "reason"])
    for reason, steps in () if snapshot is None else snapshot.eager_steps:
        eager.add_metric([model, reason], steps)
    yield eager


class MetricsServer:
    """An HTTP server over one registry, on a thread of its own.

    It answers in Prometheus' text format whatever the client prefers: in the OpenMetrics format prometheus_client (0.26) writes
    the colon of our names, and of vLLM's, as an underscore.

    Raises:
        ConfigError: the port cannot be had.
    """

    def __init__(self, registry: CollectorRegistry, port: int, address: str) -> None:
        app = make_wsgi_app(registry)

        def text_only(environ: dict[str, Any], start_response: Any) -> Any:
            environ.pop("HTTP_ACCEPT", None)
            return app(environ, start_response)

        try:
            family = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            server_class: type[WSGIServer] = type("_FamilyServer", (_ThreadingServer,), {"address_family": family})
            self._server = make_server(address, port, text_only, server_class, handler_class=_SilentHandler)
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be served at {address}:{port}: {error}; take another port, or 0 for one that is free"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="minivllm-prometheus", daemon=True)
        self._thread.start()
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop serving and free the port; takes up to half a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _ThreadingServer(ThreadingMixIn, WSGIServer):
    """One thread a request, so that a client that stalls holds up nobody."""

    daemon_threads = True


class _SilentHandler(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the parent's name for it
        """A line on standard error for each scrape is of no use."""


def _of_requests(reading: Reading) -> Iterator[Family]:
    requests, model = reading.requests, reading.model_name
    yield _counter("prompt_tokens", "Prompt tokens of requests that got a first token.", model, requests.num_prompt_tokens)
    yield _counter("generation_tokens", "Tokens generated.", model, requests.num_generation_tokens)
    yield _counter("admission_rejections", "Requests that a policy refused.", model, requests.num_rejected)
    success = CounterMetricFamily(
        f"{PREFIX}request_success", "Requests that ended, by reason.", labels=["model_name", "finished_reason"]
    )
    for reason, number in list(requests.finished.items()):
        success.add_metric([model, reason], number)
    yield success
    for name, histogram in requests.histograms.items():
        yield _histogram(name, histogram, model)


def _of_plugins(reading: Reading) -> Iterable[Family]:
    labels = ["model_name", "plugin", "hook"]
    seconds = CounterMetricFamily(f"{PREFIX}plugin_seconds", "Seconds of the engine thread that a hook took.", labels=labels)
    errors = CounterMetricFamily(f"{PREFIX}plugin_errors", "Exceptions that a hook raised.", labels=labels)
    for total in reading.totals():
        values = [reading.model_name, total.plugin, total.hook]
        seconds.add_metric(values, total.total_seconds)
        errors.add_metric(values, total.num_errors)
    return seconds, errors


def _newest(*states: EngineState | None) -> EngineState | None:
    """The snapshot lags behind steps by up to 50 ms; the latest step does not know of what was aborted since."""
    return max((state for state in states if state is not None), key=lambda state: state.now, default=None)


def _gauge(name: str, documentation: str, model: str, value: float) -> Family:
    family = GaugeMetricFamily(PREFIX + name, documentation, labels=["model_name"])
    family.add_metric([model], value)
    return family


def _counter(name: str, documentation: str, model: str, value: float) -> Family:
    family = CounterMetricFamily(PREFIX + name, documentation, labels=["model_name"])
    family.add_metric([model], value)
    return family


def _histogram(name: str, histogram: Histogram, model: str) -> Family:
    family = HistogramMetricFamily(PREFIX + name, histogram.documentation, labels=["model_name"])
    below = list(accumulate(list(histogram.counts)))  # of a copy, made at once: the engine thread may be counting
    bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
    family.add_metric([model], buckets=list(zip(bounds, below, strict=True)), sum_value=histogram.total)
    return family
