"""The ``prometheus`` plugin: what a scrape says agrees with what callers got, under names that vLLM's dashboards know."""

import gc
import math
import socket
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from settled import settled_snapshot
from waiting import wait_until

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import ConfigError, EngineDeadError, PluginError, RequestAbortedError, RequestRejectedError
from minivllm_plugin.events import RequestOutcome, StepReport
from minivllm_plugin.extensions.metrics import MetricRegistry
from minivllm_plugin.plugins import Reject, hookimpl
from minivllm_plugin.plugins.first_party.prometheus import PORT_VARIABLE, PrometheusMetrics
from minivllm_plugin.plugins.first_party.request_metrics import Histogram, RequestMetrics, token_buckets
from minivllm_plugin.serving.outputs import RequestOutput
from minivllm_plugin.testing import RepeatingTokens, ScriptedTokens, scripted_llm
from minivllm_plugin.views import EngineState, RequestView

Labels = frozenset[tuple[str, str]]
TWO_CLOCKS = 0.1  # seconds that may pass between reading one and the other on a busy machine


class Page:
    """One scrape, read by Prometheus' own parser."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples: dict[tuple[str, Labels], float] = {}
        for family in self.families.values():
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in self.samples, f"{key} stands twice"
                self.samples[key] = sample.value

    def value(self, name: str, **labels: str) -> float:
        found = [
            value
            for (sample, given), value in self.samples.items()
            if sample == f"minivllm:{name}" and labels.items() <= dict(given).items()
        ]
        assert len(found) == 1, f"{name} {labels}: {found}"
        return found[0]


@pytest.fixture
def metrics() -> PrometheusMetrics:
    return PrometheusMetrics()


def live(metrics: PrometheusMetrics, *more: object, **options: Any) -> tuple[LLM, Any]:
    settings = {"plugins": [metrics, *more], "plugin_errors": "raise", **options.pop("options", {})}
    return scripted_llm(options=settings, **options)


def run(llm: LLM, prompts: list[list[int]], max_tokens: int) -> list[RequestOutput]:
    return llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True), use_tqdm=False)


def test_counts_agree_with_the_outputs(metrics: PrometheusMetrics) -> None:
    llm, _ = live(metrics)
    with llm:
        outputs = run(llm, [[5, 6, 7], [8] * 9, [9, 1, 2, 3, 4]], 6)
        page = Page(metrics.text())  # no waiting: what a caller has been told is on the page
    assert page.value("prompt_tokens_total") == sum(len(output.prompt_token_ids) for output in outputs)
    assert page.value("generation_tokens_total") == sum(len(output.outputs[0].token_ids) for output in outputs) == 18
    assert page.value("request_success_total", finished_reason="length") == 3
    assert page.value("request_success_total", finished_reason="stop") == 0
    assert page.value("time_to_first_token_seconds_count") == 3
    assert page.value("inter_token_latency_seconds_count") == 15
    assert page.value("request_time_per_output_token_seconds_count") == 3
    assert page.value("request_prompt_tokens_sum") == 17
    assert page.value("request_generation_tokens_sum") == 18
    assert page.value("request_params_max_tokens_sum") == 18
    assert page.value("request_prompt_tokens_bucket", le="5.0") == 2
    assert page.value("request_prompt_tokens_bucket", le="+Inf") == 3


def test_a_step_whose_guesses_came_true_is_one_wait(metrics: PrometheusMetrics) -> None:
    llm, runner = live(metrics, choose=RepeatingTokens(4), options={"num_speculative_tokens": 7})
    with llm:
        run(llm, [[3, 2, 1]], 60)
        page = Page(metrics.text())
    assert page.value("generation_tokens_total") == 60
    assert page.value("spec_decode_num_accepted_tokens_total") == 60 - runner.num_calls > 20
    assert page.value("inter_token_latency_seconds_count") == runner.num_calls - 1


def test_times_agree_with_the_outputs(metrics: PrometheusMetrics) -> None:
    llm, _ = live(metrics)
    with llm:
        told = [output.metrics for output in run(llm, [[5, 6, 7], [8, 9]], 4)]
        page = Page(metrics.text())
    # The caller's clock starts earlier (before the inbox) and stops later (at the hand-over): it encloses the engine's.
    first_tokens = sum(metric.time_to_first_token or 0.0 for metric in told if metric is not None)
    whole = sum((metric.finished_time or 0.0) - metric.arrival_time for metric in told if metric is not None)
    assert 0 < page.value("time_to_first_token_seconds_sum") <= first_tokens + TWO_CLOCKS
    assert 0 < page.value("e2e_request_latency_seconds_sum") <= whole + TWO_CLOCKS
    parts = [page.value(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert math.isclose(sum(parts), page.value("e2e_request_latency_seconds_sum"), rel_tol=1e-6)
    assert math.isclose(sum(parts[1:]), page.value("request_inference_time_seconds_sum"), rel_tol=1e-6)


def test_prefix_hits_and_preemptions(metrics: PrometheusMetrics) -> None:
    llm, _ = live(metrics, num_blocks=8, block_size=4)
    with llm:
        outputs = run(llm, [[5] * 8, [6] * 8], 10)  # 9 blocks wanted, 8 there
        run(llm, [[5] * 8], 2)
        snapshot = settled_snapshot(llm)
        wait_until(lambda: Page(metrics.text()).value("prefix_cache_queries_total") >= snapshot.prefix_queried_tokens)
        page = Page(metrics.text())
    preemptions = sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None)
    assert preemptions > 0
    assert page.value("num_preemptions_total") == preemptions
    assert page.value("prefix_cache_hits_total") > 0
    assert page.value("prefix_cache_hits_total") <= page.value("prefix_cache_queries_total")
    assert page.value("prompt_tokens_total") == 24  # computing a prompt again does not count it again
    assert page.value("request_prefill_kv_computed_tokens_sum") == 24 - 4  # the last block of a prompt is always computed


def test_gauges_show_the_moment_of_the_scrape(metrics: PrometheusMetrics) -> None:
    gate = threading.Event()
    llm, runner = live(metrics, gate=gate, num_blocks=16, options={"max_num_sequences": 1})
    try:
        streams = [llm.submit([5, 6, 7], SamplingParams(max_tokens=4, ignore_eos=True)) for _ in range(3)]
        assert runner.entered.wait(20)
        wait_until(lambda: sum(Page(metrics.text()).value(f"num_requests_{name}") for name in ("running", "waiting")) >= 1)
        gate.set()
        for stream in streams:
            stream.result()
        wait_until(lambda: Page(metrics.text()).value("num_requests_running") == 0)
        page = Page(metrics.text())
        assert page.value("num_requests_waiting") == 0
        assert page.value("kv_cache_usage_perc") == 0
        assert page.value("cache_config_info", block_size="4", num_gpu_blocks="16") == 1
    finally:
        gate.set()
        llm.close()


def test_an_abort_is_seen_in_the_gauges(metrics: PrometheusMetrics) -> None:
    gate = threading.Event()
    llm, runner = live(metrics, gate=gate)
    try:
        stream = llm.submit([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True), request_id="gone")
        assert runner.entered.wait(20)
        llm.abort("gone")
        gate.set()
        with pytest.raises(RequestAbortedError):
            stream.result()
        wait_until(lambda: Page(metrics.text()).value("num_requests_running") == 0)
        assert Page(metrics.text()).value("request_success_total", finished_reason="abort") == 1
        assert Page(metrics.text()).value("kv_cache_usage_perc") == 0
    finally:
        gate.set()
        llm.close()


def test_rejections_are_counted_apart(metrics: PrometheusMetrics) -> None:
    class Doorkeeper:
        @hookimpl
        def minivllm_admit(self) -> Reject:
            return Reject("closed today")

    llm, _ = live(metrics, options={"policies": [Doorkeeper()]})
    with llm, pytest.raises(RequestRejectedError):
        llm.submit([5, 6], SamplingParams(max_tokens=1)).result()
    page = Page(metrics.text())
    assert page.value("admission_rejections_total") == 1
    assert page.value("e2e_request_latency_seconds_count") == 0


def test_other_plugins_metrics_and_costs_are_on_the_page(metrics: PrometheusMetrics) -> None:
    class Company:
        minivllm_name = "company"

        @hookimpl
        def minivllm_register_metrics(self, registry: MetricRegistry) -> None:
            registry.gauge("acme_blocks", "Blocks of the pool.", lambda state: state.num_blocks)
            registry.counter("acme_steps_total", "Steps.", lambda state: state.step)
            registry.gauge("minivllm:num_requests_running", "Takes a name that is ours.", lambda state: -1)

        @hookimpl
        def minivllm_step_finished(self) -> None:
            raise RuntimeError("on purpose")

    llm, _ = live(metrics, Company(), options={"plugin_errors": "isolate"}, num_blocks=16)
    with llm:
        run(llm, [[5, 6, 7]], 8)
        wait_until(lambda: Page(metrics.text()).samples.get(("acme_steps_total", _model()), 0) >= 8)
        page = Page(metrics.text())
    assert page.samples["acme_blocks", _model()] == 16
    assert page.value("num_requests_running") == 0
    assert page.value("plugin_errors_total", plugin="company", hook="step_finished") == 5  # then it was taken out
    assert page.value("plugin_errors_total", plugin="prometheus", hook="step_finished") == 0
    assert page.value("plugin_seconds_total", plugin="prometheus", hook="step_finished") > 0


def test_steps_that_were_not_replayed_are_counted_by_reason(metrics: PrometheusMetrics) -> None:
    llm, runner = live(metrics)
    runner.counts = SimpleNamespace(
        graph_replays=5, graph_captures=1, eager_steps={"a prompt in the batch": 2, "out of memory": 1}
    )
    with llm:
        run(llm, [[5, 6, 7]], 3)
        wait_until(lambda: Page(metrics.text()).value("graph_replays_total") == 5)
    page = Page(metrics.text())
    assert page.value("eager_steps_total", reason="a prompt in the batch") == 2
    assert page.value("eager_steps_total", reason="out of memory") == 1


def _model(name: str = "scripted") -> Labels:
    return frozenset({("model_name", name)})


def test_the_page_outlives_the_engine(metrics: PrometheusMetrics) -> None:
    llm, runner = live(metrics)
    with llm:
        run(llm, [[5, 6, 7]], 3)
    del llm, runner
    gc.collect()
    page = Page(metrics.text())
    assert page.value("generation_tokens_total") == 3
    assert page.value("prefix_cache_queries_total") == 3
    assert page.value("spec_decode_num_draft_tokens_total") == page.value("spec_decode_num_accepted_tokens_total") == 0
    assert page.value("num_requests_running") == 0
    assert page.value("plugin_seconds_total", plugin="prometheus", hook="step_finished") > 0


def test_an_engine_that_dies_leaves_its_numbers(metrics: PrometheusMetrics) -> None:
    llm, _ = live(metrics, fail_on_call=3)
    with pytest.raises(EngineDeadError):
        llm.submit([5, 6, 7], SamplingParams(max_tokens=8, ignore_eos=True)).result()
    llm.close()
    page = Page(metrics.text())
    assert page.value("generation_tokens_total") == 2
    assert page.value("num_requests_running") == 0


def test_two_engines_do_not_mix() -> None:
    one, two = PrometheusMetrics(model_name="one"), PrometheusMetrics(model_name="two")
    (first, _), (second, _) = live(one), live(two)
    with first, second:
        run(first, [[5, 6]], 2)
        run(second, [[5, 6]], 5)
        assert Page(one.text()).value("generation_tokens_total", model_name="one") == 2
        assert Page(two.text()).value("generation_tokens_total", model_name="two") == 5


def test_one_object_serves_one_engine(metrics: PrometheusMetrics) -> None:
    llm, _ = live(metrics)
    with llm, pytest.raises(ConfigError, match="make a new one"):
        live(metrics)


def test_served_on_request_and_no_longer_than_the_engine(metrics: PrometheusMetrics) -> None:
    llm, _ = live(metrics)
    with llm:
        assert metrics.url is None
        url = metrics.serve()
        assert url == metrics.url
        assert url.startswith("http://127.0.0.1:")
        with pytest.raises(ConfigError, match="already"):
            metrics.serve()
        run(llm, [[5, 6, 7]], 3)
        with urllib.request.urlopen(url, timeout=20) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            assert Page(answer.read().decode()).value("generation_tokens_total") == 3
        # What Prometheus asks for. In that format the client library loses the colon of our names.
        wanted = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text; version=1.0.0, text/plain"})
        with urllib.request.urlopen(wanted, timeout=20) as answer:
            assert Page(answer.read().decode()).value("generation_tokens_total") == 3
    assert metrics.url is None
    assert "minivllm-prometheus" not in {thread.name for thread in threading.enumerate()}
    with pytest.raises(OSError):
        urllib.request.urlopen(url, timeout=20)


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
def test_served_over_ipv6(metrics: PrometheusMetrics) -> None:
    try:
        url = metrics.serve(address="::1")
    except ConfigError:
        pytest.skip("no IPv6 loopback here")
    with urllib.request.urlopen(url, timeout=20) as answer:
        assert Page(answer.read().decode()).value("generation_tokens_total") == 0
    metrics.close()
    metrics.close()


def test_by_name_it_serves_at_the_port_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv(PORT_VARIABLE, str(port))
    llm, _ = scripted_llm(options={"plugins": ["prometheus"], "plugin_errors": "raise"})
    with llm:
        run(llm, [[5, 6, 7]], 3)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=20) as answer:
            assert Page(answer.read().decode()).value("generation_tokens_total") == 3


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_a_taken_port_stops_the_start_with_a_remedy(taken_port: int) -> None:
    with pytest.raises(ConfigError, match=rf"'prometheus'.*{taken_port}.*another port"):
        live(PrometheusMetrics(port=taken_port))
    with pytest.raises(ConfigError, match="another port"):
        PrometheusMetrics().serve(taken_port)


@pytest.mark.parametrize(
    "arguments", [{"port": -1}, {"port": 70_000}, {"port": "80"}, {"port": True}, {"address": ""}, {"model_name": ""}]
)
def test_impossible_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        PrometheusMetrics(**arguments)


def test_an_impossible_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PORT_VARIABLE, "http")
    with pytest.raises(ConfigError, match=PORT_VARIABLE):
        PrometheusMetrics()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    with pytest.raises(PluginError, match=r"minivllm-plugin\[prometheus\]"):
        PrometheusMetrics()
    with pytest.raises(PluginError, match=r"minivllm-plugin\[prometheus\]"):
        scripted_llm(options={"plugins": ["prometheus"]})


def test_times_of_one_request_are_exact() -> None:
    metrics = RequestMetrics(100)
    state = EngineState(1, 10.0, 0, 1, 8, 8, 0, 4, 4, 64, 0)
    request = RequestView("a", 0, 10.0, 0, 3, 0, 0, 0, 4, 0, 0, -1)
    metrics.queued(request, state)
    for now in (10.5, 10.75, 11.25):
        metrics.step(StepReport(("a",), (7,), (), 1, 0.0, 0.0, 0.0, 0.0, state._replace(now=now)))
    metrics.ended(request, RequestOutcome("length", None, 3, 3, 0, 0, 11.25, 0.125, 0.375, 0.75))
    sums = {name: histogram.total for name, histogram in metrics.histograms.items()}
    assert sums == {
        "iteration_tokens_total": 3,
        "time_to_first_token_seconds": 0.5,
        "inter_token_latency_seconds": 0.75,
        "request_time_per_output_token_seconds": 0.375,
        "e2e_request_latency_seconds": 1.25,
        "request_queue_time_seconds": 0.125,
        "request_prefill_time_seconds": 0.375,
        "request_decode_time_seconds": 0.75,
        "request_inference_time_seconds": 1.125,
        "request_prompt_tokens": 3,
        "request_generation_tokens": 3,
        "request_params_max_tokens": 4,
        "request_prefill_kv_computed_tokens": 3,
    }


def test_histogram_bounds_are_inclusive() -> None:
    histogram = Histogram("", (1, 2, 5))
    for value in (0.5, 1, 1.5, 5, 6):
        histogram.observe(value)
    assert histogram.counts == [2, 1, 1, 1]
    assert histogram.total == 14


@pytest.mark.parametrize(("most", "bounds"), [(1, (1,)), (4, (1, 2)), (100, (1, 2, 5, 10, 20, 50, 100)), (0, (1,))])
def test_token_buckets(most: int, bounds: tuple[int, ...]) -> None:
    assert token_buckets(most) == bounds


def test_errors_of_single_requests(metrics: PrometheusMetrics) -> None:
    from minivllm_plugin.engine.sequence import FAILED_TOKEN
    from minivllm_plugin.errors import RequestFailedError
    from minivllm_plugin.testing import HashedTokens

    llm, _ = live(metrics, choose=ScriptedTokens({"bad": [7, FAILED_TOKEN]}, HashedTokens(1000)))
    with llm, pytest.raises(RequestFailedError):
        llm.submit([5, 6], SamplingParams(max_tokens=9, ignore_eos=True), request_id="bad").result()
    assert Page(metrics.text()).value("request_success_total", finished_reason="error") == 1
    assert Page(metrics.text()).value("generation_tokens_total") == 1


@pytest.mark.model
def test_the_real_model(smollm2_gguf: Path) -> None:
    metrics = PrometheusMetrics()
    with LLM(str(smollm2_gguf), plugins=[metrics], plugin_errors="raise") as llm:
        outputs = llm.generate(["The capital of France is", "Water boils at"], SamplingParams(max_tokens=8), use_tqdm=False)
        page = Page(metrics.text())
    assert page.value("prompt_tokens_total") == sum(len(output.prompt_token_ids) for output in outputs)
    assert page.value("generation_tokens_total") == sum(len(output.outputs[0].token_ids) for output in outputs)
    told = sum(output.metrics.time_to_first_token or 0.0 for output in outputs if output.metrics is not None)
    assert 0 < page.value("time_to_first_token_seconds_sum") <= told + TWO_CLOCKS
