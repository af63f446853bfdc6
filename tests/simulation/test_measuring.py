"""A cost model measured on a real engine with a tiny model, and the script that compares prediction and measurement."""

import json
from importlib import import_module
from pathlib import Path

import pytest

from minivllm_plugin.cli import main
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation import CostModel
from minivllm_plugin.simulation.measuring import measure_cost_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "eos_token_id": 2,
    "bos_token_id": 1,
}


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tiny")
    (directory / "config.json").write_text(json.dumps(SHAPE))
    return str(directory)


def test_steps_are_recorded_with_what_they_computed(tiny_model: str) -> None:
    config = EngineConfig(model=tiny_model, load_format="dummy")
    model, records = measure_cost_model(config, sizes=(1, 3), output_tokens=6)
    works = [record.work for record in records]
    assert min(record.seconds for record in records) > 0
    assert max(work.num_decodes for work in works) == 3
    assert any(work.num_prefill_tokens == 384 for work in works)  # a long prompt, alone
    assert any(work == (0, 1, work.num_context_tokens, 0) for work in works)
    assert model(works[0]) > 0
    assert model.error < 5
    assert "measured: " in model.description
    with pytest.raises(ConfigError, match="sizes"):
        measure_cost_model(config, sizes=(0,))


def test_the_command_measures_and_keeps(tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cost.json"
    with pytest.raises(SystemExit) as left:
        main(["simulate", "--measure", tiny_model, "--load-format", "dummy", "--save-cost-model", str(path)])
    assert not left.value.code
    assert "per prefill token" in capsys.readouterr().out
    assert CostModel.load(path).per_step >= 0


@pytest.fixture
def on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.usefixtures("on_path")
def test_the_script_compares(tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost, report = tmp_path / "cost.json", tmp_path / "report.json"
    CostModel(1e-3).save(cost)
    script = import_module("simulation_accuracy")
    options = ["--n", "2", "--rounds", "1", "--load-format", "dummy", "--cost-model", str(cost), "--json", str(report)]
    script.main([tiny_model, *options])
    (row,) = json.loads(report.read_text())["summary"]
    assert row["case"] == "n=2"
    # Steps of a millisecond: as many as the longer answer has tokens, when both prompts fit into one.
    assert 1000 <= row["simulated_tok_per_s"] <= 2000
    assert row["off"] == pytest.approx(row["simulated_tok_per_s"] / row["measured_tok_per_s"] - 1, rel=0.01)
    assert "off" in capsys.readouterr().out
