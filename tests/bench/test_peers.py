"""The contest with peers: who meets whom, what is asked, and how ratios are taken. The peers themselves are stubs."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Script = Callable[[str], ModuleType]


@pytest.fixture
def contest(script: Script) -> Any:
    return script("contest")


@pytest.fixture
def peers(script: Script, contest: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script, with files that need not exist."""
    module = script("peers")
    monkeypatch.setattr(module, "gguf_file", lambda model, name, dummy, llama_cpp: f"{model}-{name}.gguf")
    monkeypatch.setattr(module, "safetensors_directory", lambda model, dummy: model)
    return module


@pytest.fixture
def maker(script: Script) -> Any:
    return script("peer_jobs").JobMaker(dummy=False, threads=2, max_model_len=700, seed=0)


def test_ratios_are_taken_within_a_round(contest: Any) -> None:
    ours, peer = (contest.Contestant(name, "Q4_0", "-", "-", "-") for name in ("minivllm", "peer"))

    def figure(turn: int, contestant: str, value: float, case: str = "n=1", unit: str = "tok/s") -> dict[str, Any]:
        return {"round": turn, "heat": 0, "contestant": contestant, "case": case, "unit": unit, "value": value}

    runs = [figure(turn, ours.name, value) for turn, value in enumerate((100.0, 10.0, 40.0))]
    runs += [figure(turn, peer.name, value) for turn, value in enumerate((50.0, 10.0, 10.0))]
    runs += [figure(0, ours.name, 2.0, "ready", "s"), figure(0, peer.name, 5.0, "ready", "s")]
    runs += [figure(0, ours.name, 2.0, "failed before the peer came to it")]
    speed, ready = contest.compare(runs, 0, ours, peer)
    assert (speed["ratio"], speed["ratio_least"], speed["ratio_most"]) == (2.0, 1.0, 4.0)
    assert (speed["ours_median"], speed["peer_median"], speed["ours"], speed["peer"]) == (40.0, 10.0, "Q4_0", "peer Q4_0")
    assert ready["ratio"] == 2.5  # less is better
    assert contest.compare(runs, 1, ours, peer) == []


def test_the_order_turns_round(contest: Any) -> None:
    names = ("int8", "int4", "peer")
    int8, int4, peer = (contest.Contestant(name, "", "-", "-", "-") for name in names)
    heat = contest.Heat(peer, (int8, int4))
    assert [[one.engine for one in heat.order(turn)] for turn in (1, 2)] == [list(names), list(names)[::-1]]


def test_jobs_hold_the_workload(maker: Any) -> None:
    from minivllm_plugin.bench.workload import offline_workload

    offline = maker.offline([1, 2], 30)
    assert [case["name"] for case in offline["cases"]] == ["n=1", "n=2", "prefill 30"]
    assert offline["cases"][1]["prompts"] == list(map(list, offline_workload(2).prompts))
    assert (offline["max_model_len"], offline["prefix_caching"]) == (700, False)
    prefix = maker.prefix(2)
    cold, warm = prefix["cases"]
    assert warm["remembered"] == warm["prompts"][0][:1000] == warm["prompts"][1][:1000]
    assert cold["prompts"][0][:1000] != warm["prompts"][0][:1000]  # or the cold case would warm the other
    assert prefix["prefix_caching"]
    assert maker.offline([3], 0)["cases"][0]["name"] == "n=3"


@pytest.mark.parametrize("text", ["--n 1 --n 8 --n 32", "--n 1 8 32", "--n 1 8 --n 32", ""])
def test_sizes_may_be_repeated_or_listed(peers: Any, text: str) -> None:
    assert peers._parse(text.split()).n == [1, 8, 32]


@pytest.mark.parametrize("text", ["--n 1,8", "--n 0", "--n x", "--rounds 0", "--ours-option speculation", "--scenario all"])
def test_options_that_make_no_sense_are_refused(peers: Any, text: str) -> None:
    with pytest.raises(SystemExit) as caught:
        peers._parse(text.split())
    assert caught.value.code == 2


def test_formats_meet_the_mode_of_their_class(peers: Any) -> None:
    asked = peers._parse(["m", "--openvino", "ov", "--llama-cpp", "lc", "--vllm", "v", "--exact", "float32"])
    heats = list(peers._heats(asked))
    assert [(heat.ours[0].format, heat.peer.name, heat.peer.python, heat.peer.script, heat.peer.model) for heat in heats] == [
        ("int8", "openvino Q4_0", "ov", "run_openvino.py", "m-Q4_0.gguf"),
        ("float32", "openvino F16", "ov", "run_openvino.py", "m-F16.gguf"),
        ("int8", "llama.cpp Q4_0", "lc", "run_llama_cpp.py", "m-Q4_0.gguf"),
        ("int8", "llama.cpp Q8_0", "lc", "run_llama_cpp.py", "m-Q8_0.gguf"),
        ("float32", "llama.cpp F16", "lc", "run_llama_cpp.py", "m-F16.gguf"),
        ("float32", "vllm bfloat16", "v", "run_vllm.py", "m"),
    ]
    assert all(len(heat.ours) == 1 for heat in heats)
    (only,) = peers._heats(peers._parse(["m", "--llama-cpp", "lc", "--formats", "Q4_0", "--quantized", "int8", "int4"]))
    assert [ours.mode for ours in only.ours] == ["int8", "int4"]
    assert list(peers._heats(peers._parse(["m"]))) == []
    with pytest.raises(SystemExit, match="no peer is named"):
        peers.main(["m"])


def test_an_option_of_ours_is_measured_beside_the_mode_without_it(peers: Any) -> None:
    options = ["--ours-option", "block_size=32", "--ours-option", "max_num_sequences=8"]
    (heat,) = peers._heats(peers._parse(["m", "--openvino", "ov", "--formats", "Q4_0", *options]))
    assert [ours.mode for ours in heat.ours] == ["int8", "int8 block_size=32 max_num_sequences=8"]
    assert heat.peer.options == ()


def test_a_peer_that_guesses_is_a_contestant_of_its_own(peers: Any) -> None:
    options = ["--openvino", "ov", "--formats", "Q4_0", "--openvino-lookup", "5", "--ours-option", "num_speculative_tokens=0"]
    plain, guessing = peers._heats(peers._parse(["m", *options]))
    assert (plain.peer.name, guessing.peer.name) == ("openvino Q4_0", "openvino Q4_0 prompt_lookup=5")
    assert [ours.mode for ours in plain.ours] == ["int8", "int8 num_speculative_tokens=0"]
    assert [ours.mode for ours in guessing.ours] == ["int8"]  # who does not guess is not compared with who does


PEER = """
import json, sys
job = json.loads(open(sys.argv[sys.argv.index("--job") + 1]).read())
print("chatter")
print("READY")
print("VERSIONS", json.dumps({"stub": "1.2"}))
for case in job["cases"]:
    tokens = sum(case["outputs"])
    print("RESULT", json.dumps({"case": case["name"], "seconds": 0.5, "output_tokens": tokens}))
print("MEMORY", json.dumps({"peak_bytes": 5000000}))
"""


def test_this_engine_against_a_stub(
    peers: Any,
    contest: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_model: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "stub.py").write_text(PEER)
    (tmp_path / "broken.py").write_text(f"raise SystemExit('it is broken, in {tmp_path}/broken.py')")
    stub, broken = (
        contest.Contestant(name, "Q4_0", sys.executable, str(tmp_path / f"{name}.py"), "-") for name in ("stub", "broken")
    )

    def ours(*further: str) -> Any:
        return contest.Contestant("minivllm", "bfloat16", sys.executable, "run_minivllm.py", tiny_model, True, further)

    def heats(options: argparse.Namespace) -> list[Any]:
        return [contest.Heat(broken, (ours(),)), contest.Heat(stub, (ours(), ours("block_size=32"), ours("no_such=1")))]

    monkeypatch.setattr(peers, "_heats", heats)
    target = tmp_path / "r.json"
    asked = ["--n", "1", "--prefill", "20", "--rounds", "1", "--threads", "1", "--max-model-len", "1200"]
    peers.main([tiny_model, *asked, "--prefix-requests", "2", "--json", str(target)])
    read = json.loads(target.read_text())
    assert {row["ours"] for row in read["summary"]} == {"bfloat16", "bfloat16 block_size=32"}
    rows = {row["case"]: row for row in read["summary"] if row["ours"] == "bfloat16"}
    assert set(rows) == {"ready", "n=1", "prefill 20", "peak memory", "prefix cold", "prefix warm"}
    assert rows["n=1"]["peer_median"] == 256.0
    assert rows["prefill 20"]["peer_median"] == 40.0  # tokens that go in are counted
    assert rows["peak memory"]["peer_median"] == 5.0
    assert {row["peer"] for row in read["summary"]} == {"stub Q4_0"}
    assert read["settings"]["versions"]["stub"] == {"stub": "1.2"}
    assert read["settings"]["versions"]["minivllm"].keys() == {"minivllm-plugin", "torch"}
    failed = read["settings"]["failed"]
    assert len(failed) == 2
    assert "it is broken, in …/broken.py" in failed[0]
    assert "no_such" in failed[1]
    assert "broken Q4_0 failed" in capsys.readouterr().err


def test_nothing_to_compare_is_a_failure(
    peers: Any, contest: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny_model: str
) -> None:
    (tmp_path / "broken.py").write_text("raise SystemExit(3)")
    broken = contest.Contestant("broken", "Q4_0", sys.executable, str(tmp_path / "broken.py"), "-")
    monkeypatch.setattr(peers, "_heats", lambda options: [contest.Heat(broken, ())])
    with pytest.raises(SystemExit, match="nothing could be compared"):
        peers.main([tiny_model, "--n", "1", "--rounds", "1"])
