"""``prometheus``: an engine's metrics for Prometheus, under vLLM's names with the prefix ``minivllm:``.

Owns the numbers and a registry of its own, so that two engines, or the program's other metrics, never clash. On the engine thread
it only counts; gauges are read from the engine's snapshot by whoever scrapes. Needs prometheus_client (extra ``prometheus``).
"""

import os
import socket
from typing import TYPE_CHECKING

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.events import RequestOutcome, StepReport
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins.facade import ConfigDraft, EngineHandle
from minivllm_plugin.plugins.first_party.request_metrics import RequestMetrics
from minivllm_plugin.plugins.first_party.single_engine import SingleEngine, require
from minivllm_plugin.views import EngineState, RequestView

if TYPE_CHECKING:
    from minivllm_plugin.plugins.first_party.prometheus_exposition import MetricsServer

__all__ = ["PORT_VARIABLE", "PrometheusMetrics"]

PORT_VARIABLE = "MINIVLLM_PROMETHEUS_PORT"
DEFAULT_MAX_MODEL_LEN = 16_384  # until the engine has started


class PrometheusMetrics(SingleEngine):
    """Metrics of one engine: ``text()`` shows them, ``serve()`` offers them over HTTP.

    Args:
        port: serve from the start of the engine on, at this port of ``address``; 0 takes a free one. None serves only when
            :meth:`serve` is called, unless the environment variable ``MINIVLLM_PROMETHEUS_PORT`` has a port.
        address: where to listen; the default is reachable from this machine only.
        model_name: the label ``model_name``; None takes the engine's.

    Attributes:
        registry: a ``prometheus_client.CollectorRegistry`` of this engine alone, for an app with its own ``/metrics``.

    Raises:
        ConfigError: an argument, or the variable, is impossible.
        PluginError: prometheus_client is not installed.
    """

    minivllm_name = "prometheus"

    def __init__(self, *, port: int | None = None, address: str = "127.0.0.1", model_name: str | None = None) -> None:
        self._port = _port_of_environment() if port is None else _checked_port("port", port)
        self._address = _checked_address(address)
        if model_name is not None and (not isinstance(model_name, str) or not model_name):
            raise ConfigError(f"model_name must be a name or None, got {model_name!r:.100}")
        require("prometheus_client", package="prometheus-client", extra="prometheus")
        from prometheus_client import CollectorRegistry

        from minivllm_plugin.plugins.first_party.prometheus_exposition import EngineCollector, Reading

        self._model_name = model_name
        self._max_model_len = DEFAULT_MAX_MODEL_LEN
        self._requests = RequestMetrics(DEFAULT_MAX_MODEL_LEN)
        self._collector = EngineCollector(Reading(model_name or "", self._requests))
        self._server: MetricsServer | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self._collector)

    def text(self) -> str:
        """All metrics now, in Prometheus' text format. Any thread."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry).decode()

    def serve(self, port: int = 0, address: str = "127.0.0.1") -> str:
        """Offer the metrics over HTTP until the engine stops, or :meth:`close` is called; returns the URL.

        Args:
            port: 0 takes a free one.
            address: the default is reachable from this machine only; there is no password.

        Raises:
            ConfigError: they are served already, or the port cannot be had.
        """
        from minivllm_plugin.plugins.first_party.prometheus_exposition import MetricsServer

        if self._server is not None:
            raise ConfigError(f"the metrics are served at {self._server.url} already; call close() first")
        self._server = MetricsServer(self.registry, _checked_port("port", port), _checked_address(address))
        return self._server.url

    @property
    def url(self) -> str | None:
        """Where the metrics are served; None while they are not."""
        server = self._server
        return None if server is None else server.url

    def close(self) -> None:
        """Stop serving; :meth:`text` goes on. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    # --- hooks -----------------------------------------------------------------------------------------------------

    @hookimpl
    def minivllm_configure(self, config: ConfigDraft) -> None:
        super().minivllm_configure(config)
        if self._port:
            _check_free(self._port, self._address)
        self._max_model_len = config.max_model_len or 0

    @hookimpl
    def minivllm_engine_started(self, engine: EngineHandle) -> None:
        from minivllm_plugin.plugins.first_party.prometheus_exposition import Reading

        super().minivllm_engine_started(engine)
        snapshot = engine.snapshot()
        pool = DEFAULT_MAX_MODEL_LEN if snapshot is None else snapshot.num_blocks * snapshot.block_size
        self._requests = RequestMetrics(min(self._max_model_len or pool, pool))
        self._collector.reading = Reading(
            self._model_name or engine.name, self._requests, engine.snapshot, engine.metrics, engine.plugin_totals
        )
        self._collector.is_running = True
        if self._port is not None and self._server is None:
            self.serve(self._port, self._address)

    @hookimpl
    def minivllm_request_queued(self, request: RequestView, state: EngineState) -> None:
        self._requests.queued(request, state)

    @hookimpl
    def minivllm_step_finished(self, report: StepReport) -> None:
        self._requests.step(report)

    @hookimpl
    def minivllm_request_finished(self, request: RequestView, outcome: RequestOutcome) -> None:
        self._requests.ended(request, outcome)

    @hookimpl
    def minivllm_engine_stopped(self, engine: EngineHandle, error: BaseException | None) -> None:
        if engine is not self._handle:
            return
        self._collector.reading = self._collector.reading.frozen()
        self._collector.is_running = False
        self.close()


def _port_of_environment() -> int | None:
    text = os.environ.get(PORT_VARIABLE, "").strip()
    if not text:
        return None
    return _checked_port(PORT_VARIABLE, int(text) if text.isascii() and text.isdigit() else text)


def _checked_port(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 65_535:
        raise ConfigError(f"{name} must be a port between 0 and 65535 (0 takes a free one), got {value!r:.100}")
    return value


def _checked_address(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ConfigError(f"address must be a host name or an IP address to listen at, such as '127.0.0.1', got {value!r:.100}")
    return value


def _check_free(port: int, address: str) -> None:
    """
    Raises:
        ConfigError: somebody else listens there, or the address is none of this machine's.
    """
    try:
        family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(place)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served at {address}:{port}: {error}; take another port, or 0 for one that is free"
        ) from error
