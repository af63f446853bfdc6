"""The scripts of ``benchmarks/`` on a tiny model, and the arithmetic of what they report."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

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
    assert {row["piece"] for row in rows if row["times_the_floor"]} == {
        "whole step",
        "qkv",
        "attention",
        "out",
        "gate_up",
        "down",
        "head",
    }
    assert all(row["ms"] > 0 for row in rows)
    for name in ("reads_MB", "M_multiply_adds"):  # a whole step's are the sums of its pieces'
        parts = [row[name] for row in rows if row["step"] == "prefill 40" and row[name] and row["piece"] != "whole step"]
        (whole,) = (row[name] for row in rows if row["step"] == "prefill 40" and row["piece"] == "whole step")
        assert whole == pytest.approx(sum(parts), rel=0.02)
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


def test_what_a_step_must_read_and_multiply(script: Script) -> None:
    from minivllm_kernels.cpu.decoder import DecoderGeometry

    shape = DecoderGeometry(64, 4, 2, 16, 128, 1000, 1e-5)
    peaks = {"int8 products": 1e9, "bfloat16 products": 5e8, "float multiply-adds": 1e8}
    work = script("bench_decoder").Work(shape, 3, "int8", "bfloat16", 1e9, peaks)
    alone, prompt = work.needs(1, 1, 100), work.needs(50, 1, 50 * 51 // 2)
    assert alone["qkv"].read == prompt["qkv"].read == 3 * (64 + 2 * 32) * 64
    assert (alone["qkv"].multiply_adds, prompt["qkv"].multiply_adds) == (3 * 128 * 64, 50 * 3 * 128 * 64)
    assert alone["head"].read == 1000 * 64
    assert (alone["attention"].read, prompt["attention"].read) == (3 * 2 * 32 * 2 * 100, 3 * 2 * 32 * 2 * 50)
    assert alone["attention"].multiply_adds == 3 * 2 * 64 * 100
    assert alone["down"].floor_seconds == pytest.approx(alone["down"].read / 1e9)  # bound by memory
    assert prompt["down"].floor_seconds == pytest.approx(50 * 3 * 128 * 64 / 1e9)  # by products
    pieces = ("qkv", "out", "gate_up", "down", "head", "attention")
    assert prompt["whole step"].floor_seconds == pytest.approx(sum(prompt[name].floor_seconds for name in pieces))


OPS = {
    "bench_norms": {"rms_norm", "add_rms_norm", "both norms of a layer, rounding included"},
    "bench_rotary_store": {"rotary", "store_kv", "norm_rotary_store", "rotation and store, bfloat16 cache"},
    "bench_silu_and_mul": {"silu_and_mul", "gate_up, int8", "gate_up, int8, silu_and_mul fused"},
    "bench_sampling": {"argmax", "sample", "sample_rows"},
}


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("name", OPS)
def test_benchmarks_of_single_ops_run(script: Script, name: str, tiny_model: str, tmp_path: Path) -> None:
    target = tmp_path / "r.json"
    common = ["--seconds", "0", "--threads", "1", "--rows", "1", "3", "--json", str(target)]
    script(name).main([tiny_model, *common])
    read = json.loads(target.read_text())
    rows = read["summary"]
    assert {row["op"] for row in rows} == OPS[name]
    assert {row["rows"] for row in rows} == {1, 3}
    assert all(row["microseconds"] > 0 for row in rows)
    assert {row["GB_per_s"] is None for row in rows if row["backend"] == "compiled step"} <= {True}
    assert read["settings"]["device"] == "cpu"


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_benchmarks_of_attention_run(
    script: Script, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Contestants that disagree would end the script. Kernels are interpreted here; without that they do not take part."""
    pytest.importorskip("triton", reason="the GPU kernels need triton (in the developers' packages on Linux)")
    target = tmp_path / "r.json"
    tiny = ["--heads", "4", "--kv-heads", "2", "--head-dim", "24", "--work", "2x5", "1x9", "--device", "cpu", "--threads", "1"]
    arguments = [*tiny, "--dtype", "float32", "--seconds", "0", "--json", str(target)]
    for interpret, who in (("1", ["plain torch", "reference", "naive triton", "ours"]), ("0", ["plain torch", "reference"])):
        monkeypatch.setenv("TRITON_INTERPRET", interpret)
        script(f"bench_attention_{kind}").main(arguments)
        read = json.loads(target.read_text())
        assert [(row["work"], row["contestant"]) for row in read["summary"]] == [(w, c) for w in ("2x5", "1x9") for c in who]
        assert all(row["microseconds"] > 0 for row in read["summary"])
        assert ("kernels interpreted" in read["title"]) == (interpret == "1")
    assert capsys.readouterr().out.count("ours does not take part: the device is cpu") == 1


def test_a_contestant_that_computes_something_else_ends_the_benchmark(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("bench_attention_decode")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setattr(sys.modules["attention_contest"], "_reference", lambda batch: lambda: batch.q)
    tiny = ["--heads", "2", "--kv-heads", "1", "--head-dim", "8", "--work", "1x3", "--device", "cpu", "--dtype", "float32"]
    with pytest.raises(SystemExit, match=r"reference on 1x3 is .* away from plain torch"):
        module.main([*tiny, "--threads", "1", "--seconds", "0"])


@pytest.mark.parametrize("name", ["perplexity", "peers", "bench_linear", "bench_decoder", "bench_machine", "bench_norms"])
def test_a_place_that_cannot_be_written_is_refused_first(
    script: Script, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        script(name).main(["--json", str(tmp_path / "missing" / "r.json")])
    assert caught.value.code == 2
    assert "its directory must exist" in capsys.readouterr().err
