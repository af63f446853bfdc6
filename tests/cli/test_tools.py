"""``minivllm models``, ``pull``, ``env`` and ``autoload``."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import minivllm_plugin

Run = Callable[..., tuple[int, str, str]]


def test_models_lists_the_catalog_and_what_is_here(run: Run, empty_cache: Path) -> None:
    code, out, _ = run("models")
    assert code == 0
    assert "smollm2-135m" in out
    assert "Qwen/Qwen3-0.6B" in out
    rows = {row["name"]: row for row in json.loads(run("models", "--json")[1])}
    assert rows["smollm2-135m"]["path"] is None
    assert rows["qwen3-0.6b"]["parameters"] == 596_049_920


@pytest.mark.model
def test_models_and_pull_know_the_local_copy(run: Run, smollm2_gguf: Path) -> None:
    rows = {row["name"]: row for row in json.loads(run("models", "--json")[1])}
    assert rows["smollm2-135m"]["local_bytes"] == smollm2_gguf.stat().st_size
    assert run("pull", "smollm2-135m") == (0, f"{smollm2_gguf}\n", "")


def test_env_tells_versions_devices_kernels_and_state(run: Run, cache_with_kernels: Path) -> None:
    code, out, _ = run("env")
    assert code == 0
    for part in ("python", "torch", "cores usable", "kernels on cpu", "attention", "reference", "MINIVLLM_CACHE"):
        assert part in out
    sections = json.loads(run("env", "--json")[1])
    assert sections["versions"]["minivllm-plugin"] == minivllm_plugin.__version__
    assert sections["cache"]["directory"] == str(cache_with_kernels)
    assert set(sections["kernels on cpu"]) >= {"linear", "attention", "rms_norm"}


def test_env_reports_a_forced_backend_that_cannot_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from minivllm_kernels import dispatch

    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "nonsense")
    dispatch.choose.cache_clear()
    try:
        code, out, _ = run("env")
    finally:
        monkeypatch.undo()
        dispatch.choose.cache_clear()
    assert code == 0
    assert "unknown backend" in out


def test_autoload_status_changes_nothing(run: Run) -> None:
    code, out, err = run("autoload")
    assert code == 0, err
    assert out.startswith(("off:", "on:"))


def test_autoload_on_and_off_call_the_adapters(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    said = {name: SimpleNamespace(explain=lambda name=name: f"{name}: done") for name in ("enable", "disable")}
    module = SimpleNamespace(enable=lambda: said["enable"], disable=lambda: said["disable"], status=None)
    monkeypatch.setitem(sys.modules, "minivllm_adapters.autoload", module)
    assert run("autoload", "on") == (0, "enable: done\n", "")
    assert run("autoload", "off") == (0, "disable: done\n", "")


def test_without_the_adapters_autoload_and_env_say_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minivllm_adapters.autoload", None)
    code, _, err = run("autoload", "on")
    assert code == 1
    assert "autoload needs minivllm_adapters.autoload" in err
    assert "unavailable" in run("env")[1]


def test_everything_but_autoload_works_without_litellm(cache_with_kernels: Path) -> None:
    code = """
import sys
sys.modules["litellm"] = None
from minivllm_plugin.cli import main
for arguments in (["models"], ["env"], ["autoload", "status"]):
    try:
        main(arguments)
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=dict(os.environ))
    assert done.returncode == 0, done.stderr


def test_a_closed_pipe_is_no_traceback(empty_cache: Path) -> None:
    code = "from minivllm_plugin.cli import main; main(['models', '--json'])"
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # the reader leaves before the first line
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(60) == 1
    assert err == b""
