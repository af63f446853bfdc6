"""The scripts a newcomer runs: executable, sound, and clear when they cannot go on. Setting up itself is what CI does."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAMS = [ROOT / "scripts" / name for name in ("demo", "test", "check", "lock")] + [ROOT / ".ci" / "run"]
BASH = shutil.which("bash")

pytestmark = pytest.mark.skipif(BASH is None, reason="the scripts are for bash")


@pytest.mark.parametrize("script", [*PROGRAMS, ROOT / "scripts" / "_setup.sh"], ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run([str(BASH), "-n", str(script)], check=True)


@pytest.mark.parametrize("script", PROGRAMS, ids=lambda path: path.name)
def test_programs_are_executable_and_stop_at_the_first_error(script: Path) -> None:
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/usr/bin/env bash"
    assert "set -euo pipefail" in lines


def test_ci_checks_then_tests() -> None:
    commands = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line.startswith("scripts/")]
    assert commands == ["scripts/check", "scripts/test"]


def test_the_demo_hands_options_of_the_page_on() -> None:
    done = subprocess.run([str(ROOT / "scripts" / "demo"), "--ui", "--no-such-option"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--no-such-option" in done.stderr
    assert "minivllm ui" in done.stderr


def test_without_a_fitting_python_the_remedy_is_named(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    tools = tmp_path / "bin"
    tools.mkdir()
    for tool in ("bash", "dirname", "env"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    (tools / "python3").write_text("#!/bin/sh\nexit 1\n")  # a python that is too old says no
    (tools / "python3").chmod(0o755)
    done = subprocess.run([str(tmp_path / "scripts" / "test")], env={"PATH": str(tools)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Python 3.11 or newer" in done.stderr
    assert "PYTHON=/path/to/python3.11" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_every_pin_is_exact_and_carries_no_build_tag() -> None:
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", pin)] == []
    names = {pin.split("==")[0].lower().replace("_", "-") for pin in pins}
    assert {"torch", "transformers", "litellm", "pytest", "ruff", "mypy", "hypothesis", "build", "hatchling"} <= names
