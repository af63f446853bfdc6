"""The ``otel`` plugin: one span a request, which says what the caller was told, under the caller's own span."""

import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.engine.sequence import FAILED_TOKEN
from minivllm_plugin.errors import (
    ConfigError,
    EngineClosedError,
    EngineDeadError,
    PluginError,
    RequestAbortedError,
    RequestFailedError,
    RequestRejectedError,
)
from minivllm_plugin.plugins import Reject, hookimpl
from minivllm_plugin.plugins.first_party.otel import RequestSpans
from minivllm_plugin.testing import HashedTokens, ScriptedTokens, scripted_llm

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
TWO_CLOCKS = 0.1  # seconds that may pass between reading one and the other on a busy machine


class Recording:
    """A provider whose spans stay in memory."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.provider = TracerProvider(shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self.exporter))

    @property
    def spans(self) -> dict[str, ReadableSpan]:
        found = {str((span.attributes or {})["gen_ai.request.id"]): span for span in self.exporter.get_finished_spans()}
        assert len(found) == len(self.exporter.get_finished_spans()), "a request has two spans"
        return found


@pytest.fixture
def recording() -> Recording:
    return Recording()


def live(recording: Recording, **options: Any) -> tuple[LLM, Any]:
    settings = {"plugins": [RequestSpans(recording.provider)], "plugin_errors": "raise", **options.pop("options", {})}
    return scripted_llm(options=settings, **options)


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def seconds(span: ReadableSpan) -> tuple[float, float]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time / 1e9, span.end_time / 1e9


def test_a_span_says_what_the_caller_was_told(recording: Recording) -> None:
    before = time.time()
    llm, _ = live(recording)
    with llm:
        outputs = {name: llm.submit(prompt, greedy(4), request_id=name) for name, prompt in (("a", [5, 6, 7]), ("b", [8, 9]))}
        told = {name: stream.result() for name, stream in outputs.items()}
    assert set(recording.spans) == {"a", "b"}
    for name, output in told.items():
        span, metrics = recording.spans[name], output.metrics
        assert metrics is not None
        attributes = dict(span.attributes or {})
        assert span.name == "llm_request"
        assert span.parent is None
        assert span.status.status_code is trace.StatusCode.UNSET
        assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "scripted"
        assert attributes["gen_ai.request.max_tokens"] == 4
        assert attributes["gen_ai.usage.prompt_tokens"] == len(output.prompt_token_ids)
        assert attributes["gen_ai.usage.completion_tokens"] == len(output.outputs[0].token_ids)
        assert attributes["gen_ai.usage.cache_read.input_tokens"] == output.num_cached_tokens
        assert attributes["gen_ai.response.finish_reasons"] == ("length",)
        start, end = seconds(span)
        # The caller's clock starts earlier and stops later than the engine's.
        assert before <= metrics.arrival_time <= start + TWO_CLOCKS
        assert end <= (metrics.finished_time or 0) + TWO_CLOCKS
        assert end - start == pytest.approx(number(attributes, "gen_ai.latency.e2e"), abs=1e-6)
        parts = [number(attributes, f"gen_ai.latency.time_in_{part}") for part in ("queue", "model_prefill", "model_decode")]
        assert sum(parts) == pytest.approx(number(attributes, "gen_ai.latency.e2e"), abs=1e-6)
        assert sum(parts[:2]) == pytest.approx(number(attributes, "gen_ai.latency.time_to_first_token"), abs=1e-9)
        assert sum(parts[1:]) == pytest.approx(number(attributes, "gen_ai.latency.time_in_model_inference"), abs=1e-9)
        assert number(attributes, "gen_ai.latency.time_to_first_token") <= (metrics.time_to_first_token or 0) + TWO_CLOCKS


def number(attributes: dict[str, Any], name: str) -> float:
    value = attributes[name]
    assert isinstance(value, float)
    return value


def test_the_callers_span_is_the_parent(recording: Recording) -> None:
    llm, _ = live(recording)
    with llm:
        for name, metadata in (
            ("child", {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}),
            ("bad", {"traceparent": "00-nonsense"}),
            ("odd", {"traceparent": 7}),
            ("none", None),
        ):
            llm.submit([5, 6], greedy(1), request_id=name, metadata=metadata).result()
    child = recording.spans["child"]
    assert child.parent is not None
    assert (f"{child.parent.trace_id:032x}", f"{child.parent.span_id:016x}") == (TRACE, SPAN)
    assert child.context is not None
    assert f"{child.context.trace_id:032x}" == TRACE
    assert child.context.trace_state.get("vendor") == "1"
    assert [recording.spans[name].parent for name in ("bad", "odd", "none")] == [None, None, None]


def test_an_unsampled_parent_is_respected(recording: Recording) -> None:
    llm, _ = live(recording)
    with llm:
        llm.submit([5, 6], greedy(1), metadata={"traceparent": f"00-{TRACE}-{SPAN}-00"}).result()
    assert recording.spans == {}


def test_preemptions_are_events_of_the_span(recording: Recording) -> None:
    llm, _ = live(recording, num_blocks=8, block_size=4)
    with llm:
        streams = [llm.submit([seed] * 8, greedy(10), request_id=str(seed)) for seed in (5, 6)]
        told = {stream.request_id: stream.result().metrics for stream in streams}
    assert sum(metrics.num_preemptions for metrics in told.values() if metrics is not None) > 0
    for name, metrics in told.items():
        assert metrics is not None
        span = recording.spans[name]
        names = [event.name for event in span.events]
        assert names == ["preempted", "resumed"] * metrics.num_preemptions
        times = [span.start_time, *(event.timestamp for event in span.events), span.end_time]
        assert times == sorted(times, key=lambda moment: moment or 0)
        assert dict(span.attributes or {})["minivllm.num_preemptions"] == metrics.num_preemptions


def test_failures_refusals_and_aborts(recording: Recording) -> None:
    class Doorkeeper:
        @hookimpl
        def minivllm_admit(self, request: Any) -> Reject | None:
            return Reject("no") if request.request_id == "refused" else None

    scripts = ScriptedTokens({"bad": [7, FAILED_TOKEN]}, HashedTokens(1000))
    llm, _ = live(recording, choose=scripts, options={"policies": [Doorkeeper()]})
    with llm:
        with pytest.raises(RequestFailedError):
            llm.submit([5, 6], greedy(9), request_id="bad").result()
        with pytest.raises(RequestRejectedError):
            llm.submit([5, 6], greedy(9), request_id="refused").result()
        stream = llm.submit([5, 6], greedy(200), request_id="left")
        next(iter(stream))
        llm.abort("left")
        with pytest.raises(RequestAbortedError):
            stream.result()
    spans = recording.spans
    codes = {name: span.status.status_code for name, span in spans.items()}
    assert codes == {"bad": trace.StatusCode.ERROR, "refused": trace.StatusCode.ERROR, "left": trace.StatusCode.UNSET}
    reasons = {name: dict(span.attributes or {})["gen_ai.response.finish_reasons"] for name, span in spans.items()}
    assert reasons == {"bad": ("error",), "refused": ("rejected",), "left": ("abort",)}
    assert "gen_ai.latency.time_to_first_token" not in dict(spans["refused"].attributes or {})


def test_an_engine_that_dies_ends_its_spans(recording: Recording) -> None:
    llm, _ = live(recording, fail_on_call=3)
    with pytest.raises(EngineDeadError):
        llm.submit([5, 6, 7], greedy(9), request_id="victim").result()
    llm.close()
    span = recording.spans["victim"]
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.status.description == "the engine died of RuntimeError"
    assert seconds(span)[0] <= seconds(span)[1]


def test_a_closed_engine_ends_its_spans(recording: Recording) -> None:
    gate = threading.Event()
    llm, runner = live(recording, gate=gate)
    stream = llm.submit([5, 6, 7], greedy(200), request_id="open")
    assert runner.entered.wait(20)
    llm._service.close_soon()  # is read when the step, which the gate holds up, is over
    gate.set()
    with pytest.raises(EngineClosedError):
        stream.result()
    llm.close()
    assert dict(recording.spans["open"].attributes or {})["gen_ai.response.finish_reasons"] == ("abort",)


def test_no_word_of_the_caller_is_in_a_span(recording: Recording) -> None:
    llm, _ = live(recording, vocab_size=10**9)
    with llm:
        llm.submit([987_654_321, 654], greedy(2), metadata={"user": "secret-name"}).result()
    (span,) = recording.exporter.get_finished_spans()
    assert "secret-name" not in span.to_json()
    assert "987654321" not in span.to_json()


def test_by_name_it_uses_the_global_provider_and_says_when_there_is_none(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        llm, _ = scripted_llm(options={"plugins": ["otel"], "plugin_errors": "raise"})
        with llm:
            assert len(llm.submit([5, 6], greedy(2)).result().outputs[0].token_ids) == 2
    assert "set_tracer_provider" in caplog.text


@pytest.mark.parametrize("arguments", [{"tracer_provider": "otlp"}, {"model_name": ""}])
def test_impossible_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        RequestSpans(**arguments)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(PluginError, match=r"minivllm-plugin\[otel\]"):
        RequestSpans()


@pytest.mark.model
def test_the_real_model(recording: Recording, smollm2_gguf: Path) -> None:
    with LLM(str(smollm2_gguf), plugins=[RequestSpans(recording.provider)], plugin_errors="raise") as llm:
        outputs = llm.generate(["The capital of France is", "Water boils at"], SamplingParams(max_tokens=8), use_tqdm=False)
    told: Sequence[tuple[int, int]] = [(len(o.prompt_token_ids), len(o.outputs[0].token_ids)) for o in outputs]
    attributes = [dict(recording.spans[output.request_id].attributes or {}) for output in outputs]
    assert [(a["gen_ai.usage.prompt_tokens"], a["gen_ai.usage.completion_tokens"]) for a in attributes] == list(told)
