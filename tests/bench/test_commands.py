"""``minivllm bench …``: options reach the engine, the table is shown, the JSON is written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from minivllm_kernels.dispatch import why_not
from minivllm_plugin.cli import app, main

COMMANDS = ("throughput", "latency", "startup", "prefix", "step")
SMALL = {
    "throughput": "--n 1,2 --prefill 40 --repeat 1",
    "latency": "--concurrency 2 --requests 3 --long-prompt 100 --repeat 1 --num-speculative-tokens 2",
    "startup": "--repeat 1",
    "prefix": "--requests 2 --shared 40 --own 4 --output 3 --repeat 1",
    "step": "--n 2 --output 100 --repeat 1 --stream",
}


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as caught:
        main(["bench", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(app, ["bench", "--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS)


@pytest.mark.parametrize("arguments", [["bench", "--help"], ["bench", "step", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    heavy = ("torch", "transformers", "tokenizers", "numpy", "minivllm_kernels", "asyncio")
    code = f"""
import sys
from minivllm_plugin.cli import main
try:
    main({arguments!r})
except SystemExit as end:
    assert not end.code, end.code
print("LOADED", [name for name in {heavy!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "LOADED []"


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_measures_shows_and_writes(
    command: str, tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if command == "step" and why_not("cpu", "cpu") is not None:
        pytest.skip("the CPU kernels cannot be used here")
    target = tmp_path / "report.json"
    engine = ["--load-format", "dummy", "--max-model-len", "512", "--dtype", "float32", "--num-threads", "1"]
    code, out, err = run(capsys, command, tiny_model, *SMALL[command].split(), *engine, "--json", str(target))
    assert code == 0, err
    read = json.loads(target.read_text())
    assert read["benchmark"] == command
    assert f"{command}: {tiny_model}" in out
    settings = read["settings"]["engine"]
    assert {name: settings[name] for name in ("model", "load_format", "max_model_len", "dtype", "num_threads")} == {
        "model": tiny_model,
        "load_format": "dummy",
        "max_model_len": 512,
        "dtype": "float32",
        "num_threads": 1,
    }
    assert settings.get("num_speculative_tokens") == (2 if command == "latency" else None)
    assert settings["resolved"]["weights"] in ("float32", "bfloat16")  # the latter are a bfloat16 checkpoint's exact values
    assert all(str(next(iter(row.values()))) in out for row in read["summary"])


@pytest.mark.parametrize("text", ["", "1,x", "0", "4,-1", ","])
def test_sizes_must_be_numbers(text: str, tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "throughput", tiny_model, "--n", text)
    assert code == 1
    assert "must be numbers of at least 1" in err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_json_place_that_cannot_be_is_refused_before_anything_runs(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, command, "no such model", "--json", str(tmp_path / "missing" / "r.json"))
    assert code == 1
    assert "its directory must exist" in err


def test_an_engine_that_cannot_be_is_one_message(tiny_model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "prefix", tiny_model, "--load-format", "dummy", "--quantization", "int3")
    assert code == 1
    assert err.startswith("minivllm: quantization must be one of")
    code, _, err = run(capsys, "prefix", tiny_model, "--load-format", "dummy", "--shared", "5000", "--requests", "1")
    assert code == 1
    assert "5032" in err
