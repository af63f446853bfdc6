"""The program itself: help, version, how errors reach a person."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

import minivllm_plugin
from minivllm_plugin.errors import ContextWindowExceededError

Run = Callable[..., tuple[int, str, str]]


def test_help_lists_every_command() -> None:
    from minivllm_plugin.cli import app

    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for name in ("chat", "generate", "pull", "models", "env", "autoload", "--version", "--debug"):
        assert name in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["chat", "--help"], ["generate", "-h"], ["--version"], ["models", "--help"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    heavy = (
        "torch",
        "transformers",
        "litellm",
        "tokenizers",
        "huggingface_hub",
        "numpy",
        "minivllm_kernels",
        "minivllm_adapters",
    )
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


def test_version(run: Run) -> None:
    code, out, _ = run("--version")
    assert (code, out) == (0, f"minivllm-plugin {minivllm_plugin.__version__}\n")


def test_a_typed_error_is_one_message_and_exit_code_1(run: Run) -> None:
    code, out, err = run("pull", "smolm2-135m")
    assert (code, out) == (1, "")
    assert err.startswith("minivllm: no model is called 'smolm2-135m'. Did you mean")
    assert "Traceback" not in err


@pytest.mark.parametrize("arguments", [("--debug", "pull", "nothing"), ("pull", "nothing", "--debug")])
def test_debug_adds_the_traceback(run: Run, arguments: tuple[str, ...]) -> None:
    code, _, err = run(*arguments)
    assert code == 1
    assert "Traceback" in err
    assert err.rstrip().splitlines()[-1].startswith("minivllm: no model is called 'nothing'")


def test_wrong_usage_is_exit_code_2(run: Run) -> None:
    assert run("generate", "m", "--no-such-option")[0] == 2
    assert run("autoload", "maybe")[0] == 2


def test_an_engine_error_still_closes_the_engine(run: Run, llm: Any) -> None:
    llm.error = ContextWindowExceededError("the prompt has 99 tokens, the window 64; shorten it")
    code, out, err = run("generate", "m", "hello")
    assert (code, out) == (1, "")
    assert err == "minivllm: the prompt has 99 tokens, the window 64; shorten it\n"
    assert llm.closed == 1
