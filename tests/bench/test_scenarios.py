"""Every scenario on a tiny model: what was sent is what was counted. Nothing here looks at how long anything took."""

import json
import math
from typing import Any

import pytest

from minivllm_kernels.dispatch import why_not
from minivllm_plugin import LLM
from minivllm_plugin.bench.latency import measure_latency
from minivllm_plugin.bench.prefix import measure_prefix
from minivllm_plugin.bench.report import Report
from minivllm_plugin.bench.startup import measure_startup
from minivllm_plugin.bench.step import PARTS, measure_steps
from minivllm_plugin.bench.throughput import measure_throughput
from minivllm_plugin.bench.workload import offline_workload
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import ConfigError, EngineError, UnsupportedFeatureError


def check(report: Report, cases: list[str], key: str = "case") -> None:
    """It is JSON without NaN, its summary has these rows, all with the same keys, and all numbers are of something."""
    json.loads(report.to_json(), parse_constant=pytest.fail)
    assert [row[key] for row in report.summary] == cases
    assert len({tuple(row) for row in report.summary}) == 1
    for row in report.summary:
        assert all(math.isfinite(value) and value >= 0 for value in row.values() if isinstance(value, float))


def test_throughput_counts_what_the_workload_asks_for(tiny_llm: LLM) -> None:
    report = measure_throughput(tiny_llm, sizes=(1, 3), repeat=2, prefill_tokens=40)
    check(report, ["n=1", "n=3", "prefill 40"])
    work = offline_workload(3)
    runs = {run["case"]: run for run in report.runs}
    assert [run["case"] for run in report.runs] == ["n=1", "n=3", "prefill 40"] * 2
    assert (runs["n=1"]["input_tokens"], runs["n=1"]["output_tokens"]) == (32, 128)
    assert (runs["n=3"]["input_tokens"], runs["n=3"]["output_tokens"]) == (work.num_input_tokens, work.num_output_tokens)
    assert (runs["prefill 40"]["input_tokens"], runs["prefill 40"]["output_tokens"]) == (40, 1)
    assert all(run["seconds"] > 0 for run in report.runs)
    three = report.summary[1]
    assert three["out_tok_per_s"] == pytest.approx(three["output_tokens"] / three["seconds"], rel=0.01)
    assert three["total_tok_per_s"] > three["out_tok_per_s"]
    assert report.summary[2]["out_tok_per_s"] is None


def test_no_run_finds_anything_cached(tiny_llm: LLM) -> None:
    for _ in range(2):  # the second time everything has been computed before
        report = measure_throughput(tiny_llm, sizes=(2,), repeat=2, prefill_tokens=64)
    assert [run["cached_tokens"] for run in report.runs] == [0] * 4


def test_the_engine_is_described_as_it_is(tiny_llm: LLM, tiny_model: str) -> None:
    engine = measure_throughput(tiny_llm, sizes=(1,), repeat=1, prefill_tokens=0).settings["engine"]
    assert engine["model"] == tiny_model
    assert engine["load_format"] == "dummy"
    assert engine["resolved"]["max_model_len"] == tiny_llm.max_model_len
    assert engine["resolved"]["weights"] == tiny_llm.dtype
    assert engine["resolved"]["num_threads"] >= 1


def test_latency_sees_every_token_of_every_reader(tiny_llm: LLM) -> None:
    report = measure_latency(tiny_llm, concurrency=2, num_requests=5, long_prompt=300, repeat=2)
    check(report, ["steady", "long prompt: decoders", "long prompt: itself"])
    assert [row["requests"] for row in report.summary] == [5, 4, 2]
    steady = [run for run in report.runs if run["case"] == "steady"]
    assert [run["output_tokens"] for run in steady] == list(offline_workload(5).output_lengths)
    assert {run["prompt_tokens"] for run in report.runs if run["case"] == "long prompt: itself"} == {300}
    assert all(run["cached_tokens"] == 0 for run in report.runs)
    for row in report.summary:
        assert row["first_p50_ms"] <= row["first_p90_ms"] <= row["first_p99_ms"] <= row["first_max_ms"]
    assert report.summary[2]["between_p50_ms"] is None


def test_prefix_cases_differ_in_what_is_cached(tiny_llm: LLM) -> None:
    report = measure_prefix(tiny_llm, num_requests=3, shared=100, own=8, output=4, repeat=2)
    check(report, ["apart", "cold", "warm"])
    cached = {case: {run["cached_tokens"] for run in report.runs if run["case"] == case} for case in ("apart", "cold", "warm")}
    assert cached["apart"] == {0}
    assert cached["warm"] == {3 * 96}  # whole blocks of 16
    assert max(cached["cold"]) <= 2 * 96
    assert {run["output_tokens"] for run in report.runs} == {12}
    assert {run["input_tokens"] for run in report.runs} == {3 * 108}


@pytest.fixture
def compiled() -> None:
    reason = why_not("cpu", "cpu")
    if reason is not None:
        pytest.skip(f"the CPU kernels cannot be used here: {reason}")


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("stream", [False, True])
def test_step_parts_add_up(tiny_model: str, stream: bool) -> None:
    config = EngineConfig(model=tiny_model, load_format="dummy")
    report = measure_steps(config, num_sequences=3, output=200, stream=stream, repeat=2)
    check(report, list(PARTS), key="part")
    assert report.facts["steps_counted"] == len(report.runs)
    assert 0 < len(report.runs) <= 2 * 198  # at most, when all arrive together
    for run in report.runs:
        assert run["kernels"] > 0
        assert run["whole step"] == pytest.approx(run["kernels"] + run["outside kernels"], abs=0.001)
        parts = ("kernels", "schedule", "inputs and sampling", "postprocess", "records", "publish")
        assert run["whole step"] == pytest.approx(sum(run[part] for part in parts), abs=0.001)


@pytest.mark.usefixtures("compiled")
def test_step_leaves_the_library_as_it_was(tiny_model: str) -> None:
    from minivllm_kernels.cpu.library import kernel_library

    before = kernel_library().minivllm_decoder_run
    measure_steps(EngineConfig(model=tiny_model, load_format="dummy"), num_sequences=2, output=100, repeat=1)
    assert kernel_library().minivllm_decoder_run is before


@pytest.mark.usefixtures("compiled")
def test_step_refuses_what_it_could_not_count(tiny_model: str) -> None:
    config = EngineConfig(model=tiny_model, load_format="dummy", max_num_sequences=2)
    with pytest.raises(ConfigError, match=r"at most 2 run .*lower --n"):
        measure_steps(config, num_sequences=3, output=4, repeat=1)
    config = EngineConfig(model=tiny_model, load_format="dummy", dtype="float16")
    with pytest.raises(UnsupportedFeatureError, match="compiled CPU kernels only"):
        measure_steps(config, num_sequences=2, output=4, repeat=1)


def test_startup_measures_fresh_processes(tiny_model: str) -> None:
    report = measure_startup(tiny_model, {"load_format": "dummy"}, repeat=1)
    check(report, [row["phase"] for row in report.summary], key="phase")
    assert len(report.runs) == 2  # one unmeasured
    for run in report.runs:
        moments = run["moments"]
        order = [moments[name] for name in ("spawned", "started", "imported", "ready", "request_made", "first_token")]
        assert order == sorted(order)


def test_startup_reports_what_went_wrong(tiny_model: str, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="unknown engine option"):
        measure_startup(tiny_model, {"load_fromat": "dummy"}, repeat=1)
    with pytest.raises(EngineError, match=r"could not start: .*nowhere"):
        measure_startup(str(tmp_path / "nowhere"), {}, repeat=1)
