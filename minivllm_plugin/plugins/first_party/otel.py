"""``otel``: one OpenTelemetry span a request, as vLLM has it. Needs the API, and an SDK to go anywhere (extra ``otel``).

Owns what it remembers of live requests; a span is made when its request ends. Engine thread; exporting is the SDK's business: its
BatchSpanProcessor has a thread of its own.

A caller's own span becomes the parent when the request's metadata hold it as W3C Trace Context:
``submit(…, metadata={"traceparent": "00-…-…-01"})``.
"""

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.events import RequestOutcome, StepPlan
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins.facade import EngineHandle
from minivllm_plugin.plugins.first_party.single_engine import SingleEngine, require
from minivllm_plugin.views import EngineState, RequestView

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from minivllm_plugin.plugins.first_party.otel_spans import Moment, SpanWriter

__all__ = ["RequestSpans"]

WORTH_AN_ERROR = {"error": "the request failed", "rejected": "a policy refused the request"}


@dataclass(slots=True)
class _LiveRequest:
    """``offset``: nanoseconds from the engine's clock to the time since 1970, taken when the request was queued."""

    request: RequestView
    offset: int
    moments: "list[Moment]" = field(default_factory=list)

    def wall_time(self, seconds: float) -> int:
        return round(seconds * 1e9) + self.offset


class RequestSpans(SingleEngine):
    """A span for every request, from queued to its end, with preemptions as span events.

    Args:
        tracer_provider: None takes the program's global one, such as ``opentelemetry-instrument`` sets.
        model_name: of the attributes; None takes the engine's.

    Raises:
        ConfigError: an argument is impossible.
        PluginError: opentelemetry-api is not installed.
    """

    minivllm_name = "otel"

    def __init__(self, tracer_provider: "TracerProvider | None" = None, *, model_name: str | None = None) -> None:
        require("opentelemetry.trace", package="opentelemetry-api", extra="otel")
        from minivllm_plugin.plugins.first_party.otel_spans import check_provider

        if model_name is not None and (not isinstance(model_name, str) or not model_name):
            raise ConfigError(f"model_name must be a name or None, got {model_name!r:.100}")
        self._provider = check_provider(tracer_provider)
        self._model_name = model_name
        self._writer: SpanWriter | None = None
        self._live: dict[str, _LiveRequest] = {}

    @hookimpl
    def minivllm_engine_started(self, engine: EngineHandle) -> None:
        from minivllm_plugin.plugins.first_party.otel_spans import SpanWriter

        super().minivllm_engine_started(engine)
        self._writer = SpanWriter(self._provider, self._model_name or engine.name)

    @hookimpl
    def minivllm_request_queued(self, request: RequestView, state: EngineState) -> None:
        self._live[request.request_id] = _LiveRequest(request, time.time_ns() - round(state.now * 1e9))

    @hookimpl
    def minivllm_step_started(self, plan: StepPlan) -> None:
        if plan.preempted or plan.resumed:
            self._note("preempted", plan.preempted, plan.state.now)
            self._note("resumed", plan.resumed, plan.state.now)

    @hookimpl
    def minivllm_request_finished(self, request: RequestView, outcome: RequestOutcome) -> None:
        live = self._live.pop(request.request_id, None)
        if live is None:  # rejected: it was never queued
            live = _LiveRequest(request, time.time_ns() - round(outcome.finished_time * 1e9))
        if self._writer is not None:
            start, end = live.wall_time(request.arrival_time), live.wall_time(outcome.finished_time)
            self._writer.write(request, outcome, start, end, live.moments, WORTH_AN_ERROR.get(outcome.reason))

    @hookimpl
    def minivllm_engine_stopped(self, engine: EngineHandle, error: BaseException | None) -> None:
        if engine is not self._handle or self._writer is None:
            return
        # A closed engine has aborted its requests; one that died could not.
        because = f"the engine died of {type(error).__name__}"
        for live in self._live.values():
            start = live.wall_time(live.request.arrival_time)
            self._writer.write(live.request, None, start, time.time_ns(), live.moments, because)
        self._live.clear()

    def _note(self, name: str, request_ids: tuple[str, ...], now: float) -> None:
        from minivllm_plugin.plugins.first_party.otel_spans import Moment

        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is not None:
                live.moments.append(Moment(name, live.wall_time(now)))
