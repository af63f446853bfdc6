"""The scripts of ``benchmarks/`` on a tiny model, and the arithmetic of what they report."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from minivllm_kernels.dispatch import why_not

Script = Callable[[str], ModuleType]


@pytest.fixture
def compiled() -> None:
    reason = why_not("cpu", "cpu")
    if reason is not None:
        pytest.skip(f"the CPU kernels cannot be used here: {reason}")


class Uniform:
    """A decoder that finds all of ten tokens equally likely, or is sure of the right one."""

    block_size = 16

    def __init__(self, sure: bool = False) -> None:
        self.sure = sure
        self.asked: list[tuple[int, int, int]] = []

    def forward(
        self, ids: Sequence[int], queries: list[int], lengths: list[int], tables: list[list[int]], rows: list[int]
    ) -> torch.Tensor:
        self.asked.append((len(ids), lengths[0], len(tables[0])))
        logits = torch.zeros(len(rows), 10)
        if self.sure:
            logits[range(len(rows)), torch.tensor(ids[1:])] = 50.0
        return logits


def test_perplexity_of_known_predictions(script: Script) -> None:
    perplexity = script("perplexity").perplexity
    windows = [[1, 2, 3, 4], list(range(10)) * 2]
    decoder = Uniform()
    assert perplexity(decoder, windows) == pytest.approx(10.0)
    assert decoder.asked == [(4, 4, 1), (20, 20, 2)]
    assert perplexity(Uniform(sure=True), windows) == pytest.approx(1.0)


def test_windows_are_spread_over_the_text(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("perplexity")
    ids = list(range(1000))
    monkeypatch.setattr(module, "resolve", lambda name: name)
    about = type("About", (), {"tokenizer_directory": Path("here")})
    monkeypatch.setattr(module, "describe_model", lambda source, load_format: about)
    fake = type("Fake", (), {"load": staticmethod(lambda directory: type("T", (), {"encode": staticmethod(lambda text: ids)}))})
    monkeypatch.setattr(module, "Tokenizer", fake)
    windows = module._windows("m", "auto", 18, 10)
    assert [len(window) for window in windows] == [10, 10]
    assert (windows[0][0], windows[-1][-1]) == (0, 999)
    assert module._windows("m", "auto", 999, 1000) == [ids]
    with pytest.raises(SystemExit, match="lower --tokens"):
        module._windows("m", "auto", 2000, 10)


@pytest.mark.model
@pytest.mark.usefixtures("compiled", "smollm2_gguf")
def test_perplexity_of_the_real_model(script: Script, tmp_path: Path) -> None:
    target = tmp_path / "p.json"
    arguments = "--tokens 200 --window 128 --cache float32 --weights float32 --weights int8 --group 32"
    script("perplexity").main([*arguments.split(), "--json", str(target)])
    read = json.loads(target.read_text())
    assert [(row["weights"], row["activation_group"]) for row in read["summary"]] == [("float32", None), ("int8", 32)]
    assert all(4 < row["perplexity"] < 60 for row in read["summary"])
    assert read["summary"][0]["percent_over_float32"] == 0
    assert abs(read["summary"][1]["percent_over_float32"]) < 5
    assert read["settings"]["predicted_tokens"] == 254


@pytest.mark.usefixtures("compiled")
def test_op_benchmarks_run(script: Script, tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "r.json"
    common = ["--seconds", "0", "--threads", "1", "--json", str(target)]
    script("bench_linear").main([tiny_model, "--rows", "1", "--rows", "3", "--copies", "2", *common])
    rows = json.loads(target.read_text())["summary"]
    assert {row["matrix"] for row in rows} == {"qkv", "out", "gate_up", "down", "head"}
    assert {row["rows"] for row in rows} == {1, 3}
    assert all(row["microseconds"] > 0 for row in rows)
    script("bench_decoder").main([tiny_model, "--batch", "2,20", "--prefill", "40", "--cache", "int8", *common])
    rows = json.loads(target.read_text())["summary"]
    assert [row["step"] for row in rows if row["piece"] == "whole step"] == ["decode 2 x 20", "prefill 40"]
    assert {row["piece"] for row in rows if row["floor_ms"]} == {
        "whole step",
        "qkv",
        "attention",
        "out",
        "gate_up",
        "down",
        "head",
    }
    assert all(row["ms"] > 0 for row in rows)
    script("bench_machine").main(["--megabytes", "1", *common])
    rows = json.loads(target.read_text())["summary"]
    assert [row["what"] for row in rows] == ["read 1 MB", "int8 products", "bfloat16 products", "float multiply-adds"]
    assert all(math.isfinite(row["median"]) and row["median"] > 0 for row in rows)
    assert "floors with the" in capsys.readouterr().out


def test_the_benchmark_of_observers_runs(script: Script, tmp_path: Path) -> None:
    target = tmp_path / "r.json"
    script("observers").main(["--step-ms", "10", "--steps", "20", "--repeat", "1", "--json", str(target)])
    rows = json.loads(target.read_text())["summary"]
    assert [row["plugin"] for row in rows] == ["no plugin", "prometheus", "kv-events", "trace", "otel"]
    assert rows[0]["us_a_step"] == 0


def test_the_benchmark_of_the_page_runs(script: Script, tmp_path: Path) -> None:
    pytest.importorskip("gradio", reason="the page needs Gradio: pip install 'minivllm-plugin[ui]'")
    target = tmp_path / "r.json"
    short = ["--seconds", "0.3", "--settle", "0", "--rounds", "1", "--steps", "20", "--repeat", "1", "--frames", "1"]
    script("page_costs").main([*short, "--json", str(target)])
    rows = {(row["what"], row["blocks"]): row for row in json.loads(target.read_text())["summary"]}
    assert {what for what, blocks in rows if blocks == 1000} >= {
        "observer, engine thread",
        "idle engine, one poller more",
        "busy engine, one poller more",
    }
    assert rows["snapshot, engine thread", 10_000]["median"] > 0
    assert all(rows[f"{state} engine, nobody looks", 1000]["median"] > 0 for state in ("idle", "busy"))


@pytest.mark.parametrize("steps", ["0", "100000"])
def test_the_benchmark_of_the_page_refuses_what_does_not_fit(script: Script, steps: str) -> None:
    pytest.importorskip("gradio", reason="the page needs Gradio: pip install 'minivllm-plugin[ui]'")
    with pytest.raises(SystemExit) as caught:
        script("page_costs").main(["--steps", steps])
    assert caught.value.code == 2


def test_seconds_of_is_a_median_of_at_least_five(script: Script) -> None:
    calls: list[int] = []
    assert script("op_timing").seconds_of(lambda: calls.append(1), 0.0) >= 0
    assert len(calls) == 6


@pytest.mark.parametrize("name", ["perplexity", "peers", "bench_linear", "bench_decoder", "bench_machine"])
def test_a_place_that_cannot_be_written_is_refused_first(
    script: Script, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        script(name).main(["--json", str(tmp_path / "missing" / "r.json")])
    assert caught.value.code == 2
    assert "its directory must exist" in capsys.readouterr().err


@pytest.fixture
def peers(script: Script) -> Any:
    return script("peers")


def options(peers: Any, *arguments: str) -> Any:
    return peers._parse(arguments)


def test_ratios_are_taken_within_a_round(peers: Any) -> None:
    def figure(turn: int, contestant: str, value: float, case: str = "n=1", unit: str = "tok/s") -> dict[str, Any]:
        return {"round": turn, "pair": 0, "contestant": contestant, "case": case, "unit": unit, "value": value}

    runs = [figure(turn, "minivllm int8", value) for turn, value in enumerate((100.0, 10.0, 40.0))]
    runs += [figure(turn, "peer Q4_0", value) for turn, value in enumerate((50.0, 10.0, 10.0))]
    runs += [figure(0, "minivllm int8", 2.0, "ready", "s"), figure(0, "peer Q4_0", 5.0, "ready", "s")]
    speed, ready = peers.compare(runs, 0, "minivllm int8", "peer Q4_0")
    assert (speed["ratio"], speed["ratio_least"], speed["ratio_most"]) == (2.0, 1.0, 4.0)
    assert (speed["ours_median"], speed["peer_median"], speed["ours"], speed["peer"]) == (40.0, 10.0, "int8", "peer Q4_0")
    assert ready["ratio"] == 2.5  # less is better
    assert peers.compare(runs, 1, "minivllm int8", "peer Q4_0") == []


def test_jobs_hold_the_workload(peers: Any) -> None:
    from minivllm_plugin.bench.workload import offline_workload

    offline = peers._offline_job(options(peers, "--n", "1,2", "--prefill", "30", "--max-model-len", "700"))
    assert [case["name"] for case in offline["cases"]] == ["n=1", "n=2", "prefill 30"]
    assert offline["cases"][1]["prompts"] == list(map(list, offline_workload(2).prompts))
    assert (offline["max_model_len"], offline["prefix_caching"]) == (700, False)
    prefix = peers._prefix_job(options(peers, "--n", "2"))
    cold, warm = prefix["cases"]
    assert warm["remembered"] == warm["prompts"][0][:1000]
    assert cold["prompts"][0][:1000] != warm["prompts"][0][:1000]  # or the cold case would warm the other
    assert prefix["prefix_caching"]


def test_formats_meet_the_mode_of_their_class(peers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "gguf_file", lambda model, name, dummy, llama_cpp: f"{model}-{name}.gguf")
    monkeypatch.setattr(peers, "safetensors_directory", lambda model, dummy: model)
    asked = options(peers, "m", "--openvino", "ov", "--llama-cpp", "lc", "--vllm", "v", "--exact", "float32")
    pairs = [(ours.format, peer.name, peer.python, peer.script, peer.model) for ours, peer in peers._pairs(asked)]
    assert pairs == [
        ("int8", "openvino Q4_0", "ov", "run_openvino.py", "m-Q4_0.gguf"),
        ("float32", "openvino F16", "ov", "run_openvino.py", "m-F16.gguf"),
        ("int8", "llama.cpp Q4_0", "lc", "run_llama_cpp.py", "m-Q4_0.gguf"),
        ("int8", "llama.cpp Q8_0", "lc", "run_llama_cpp.py", "m-Q8_0.gguf"),
        ("float32", "llama.cpp F16", "lc", "run_llama_cpp.py", "m-F16.gguf"),
        ("float32", "vllm bfloat16", "v", "run_vllm.py", "m"),
    ]
    only = options(peers, "m", "--llama-cpp", "lc", "--formats", "Q4_0", "--quantized", "int8", "--quantized", "int4")
    assert [ours.format for ours, _ in peers._pairs(only)] == ["int8", "int4"]
    assert list(peers._pairs(options(peers, "m"))) == []
    with pytest.raises(SystemExit, match="no peer is named"):
        peers.main(["m"])


PEER = """
import json, sys
job = json.loads(open(sys.argv[sys.argv.index("--job") + 1]).read())
print("chatter")
print("READY")
for case in job["cases"]:
    tokens = sum(case["outputs"])
    print("RESULT", json.dumps({"case": case["name"], "seconds": 0.5, "output_tokens": tokens}))
print("MEMORY", json.dumps({"peak_bytes": 5000000}))
"""


def test_this_engine_against_a_stub(
    peers: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    (tmp_path / "stub.py").write_text(PEER)
    (tmp_path / "broken.py").write_text("raise SystemExit('it is broken')")
    ours = peers.Contestant("minivllm", "bfloat16", sys.executable, "run_minivllm.py", tiny_model, dummy=True)
    stub, broken = (
        peers.Contestant(name, "Q4_0", sys.executable, str(tmp_path / f"{name}.py"), "-") for name in ("stub", "broken")
    )
    monkeypatch.setattr(peers, "_pairs", lambda options: [(ours, broken), (ours, stub)])
    target = tmp_path / "r.json"
    asked = ["--n", "1", "--prefill", "20", "--rounds", "1", "--threads", "1", "--max-model-len", "1200"]
    peers.main([tiny_model, *asked, "--json", str(target)])
    read = json.loads(target.read_text())
    rows = {row["case"]: row for row in read["summary"]}
    assert set(rows) == {"ready", "n=1", "prefill 20", "peak memory", "prefix cold", "prefix warm"}
    assert rows["n=1"]["peer_median"] == 256.0
    assert rows["prefill 20"]["peer_median"] == 40.0  # tokens that go in are counted
    assert rows["peak memory"]["peer_median"] == 5.0
    assert {row["peer"] for row in read["summary"]} == {"stub Q4_0"}
    assert len(read["settings"]["failed"]) == 1
    assert "it is broken" in read["settings"]["failed"][0]
    assert "broken Q4_0 failed" in capsys.readouterr().err
