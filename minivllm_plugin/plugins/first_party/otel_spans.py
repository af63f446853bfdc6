"""One request as an OpenTelemetry span. Imports the OpenTelemetry API, and nothing of its SDK.

Names and attributes are vLLM's (span ``llm_request``, ``gen_ai.usage.prompt_tokens``, ``gen_ai.latency.*``), beside those of the
GenAI semantic conventions that have replaced some of them. No prompt, no answer, no metadata of the caller.
Loaded only by :class:`~minivllm_plugin.plugins.first_party.otel.RequestSpans`.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.events import RequestOutcome
from minivllm_plugin.views import RequestView

__all__ = ["Moment", "SpanWriter", "check_provider"]

logger = logging.getLogger(__name__)

SPAN_NAME = "llm_request"
CARRIER_KEYS = ("traceparent", "tracestate")  # W3C Trace Context


class Moment(NamedTuple):
    """Something that happened to a request. ``time`` is nanoseconds since 1970, as all times here."""

    name: str
    time: int


class SpanWriter:
    """Makes finished spans.

    Args:
        provider: whose tracer to use; None takes the global one, also if it is set later.
        model_name: ``gen_ai.request.model`` and ``gen_ai.response.model``.
    """

    def __init__(self, provider: trace.TracerProvider | None, model_name: str) -> None:
        self._tracer = trace.get_tracer("minivllm_plugin", tracer_provider=provider)
        self._propagator = TraceContextTextMapPropagator()
        self._model_name = model_name
        if provider is None and isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
            logger.warning(
                "no tracer provider is set, so the spans of engine %r go nowhere; call opentelemetry.trace.set_tracer_provider()",
                model_name,
            )

    def write(
        self,
        request: RequestView,
        outcome: RequestOutcome | None,
        start: int,
        end: int,
        moments: Iterable[Moment],
        error: str | None,
    ) -> None:
        """One span, from ``start`` to ``end``.

        Args:
            outcome: None for a request that ended with its engine.
            error: what went wrong, in words that hold nothing of the caller's; None for nothing.
        """
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._parent(request.metadata),
            kind=trace.SpanKind.INTERNAL,  # the model runs in the caller's own process
            attributes=self._attributes(request, outcome),
            start_time=start,
        )
        for moment in moments:
            span.add_event(moment.name, timestamp=moment.time)
        if error is not None:
            span.set_status(trace.Status(trace.StatusCode.ERROR, error))
        span.end(end_time=max(start, end))

    def _parent(self, metadata: Mapping[str, object]) -> Context:
        carrier = {key: value for key in CARRIER_KEYS if isinstance(value := metadata.get(key), str)}
        # An empty context, not the current one: nothing on the engine thread has to do with this request.
        return self._propagator.extract(carrier, context=Context())

    def _attributes(self, request: RequestView, outcome: RequestOutcome | None) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue | None] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "minivllm",
            "gen_ai.request.model": self._model_name,
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": request.request_id,
            "gen_ai.request.max_tokens": request.max_tokens,
            "gen_ai.usage.prompt_tokens": request.num_prompt_tokens,
            "gen_ai.usage.input_tokens": request.num_prompt_tokens,
            "minivllm.priority": request.priority,
        }
        if outcome is not None:
            attributes |= _outcome_attributes(request, outcome)
        return {name: value for name, value in attributes.items() if value is not None}


def _outcome_attributes(request: RequestView, outcome: RequestOutcome) -> dict[str, AttributeValue | None]:
    queue, prefill, decode = outcome.queue_seconds, outcome.prefill_seconds, outcome.decode_seconds
    return {
        "gen_ai.response.finish_reasons": (outcome.reason,),
        "gen_ai.usage.completion_tokens": outcome.num_completion_tokens,
        "gen_ai.usage.output_tokens": outcome.num_completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": outcome.num_cached_tokens,
        "gen_ai.latency.e2e": outcome.finished_time - request.arrival_time,
        "gen_ai.latency.time_in_queue": queue,
        "gen_ai.latency.time_to_first_token": None if queue is None or prefill is None else queue + prefill,
        "gen_ai.latency.time_in_model_prefill": prefill,
        "gen_ai.latency.time_in_model_decode": decode,
        "gen_ai.latency.time_in_model_inference": None if prefill is None or decode is None else prefill + decode,
        "minivllm.num_preemptions": outcome.num_preemptions,
    }


def check_provider(provider: object) -> trace.TracerProvider | None:
    """
    Raises:
        ConfigError: it is none.
    """
    if provider is not None and not isinstance(provider, trace.TracerProvider):
        raise ConfigError(f"tracer_provider must be an OpenTelemetry TracerProvider or None, got {provider!r:.100}")
    return provider
