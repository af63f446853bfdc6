"""The example plugin as a stranger would have it: its own wheel, installed beside us, its own tests, found and listed.

The environment is made here: empty, and seeing the packages of the one that runs the tests. That one is not touched.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "minivllm-fair-share"
NAME = "fair-share"
OURS = ("COV_", "PYTHONPATH", "PYTEST_", "MINIVLLM_")  # settings of the run that this test is in

# One request runs at a time; tenant a sends three, then b one. What the engine has loaded, and in which order they ran.
ORDER = """
import json, sys, threading
from minivllm_plugin import SamplingParams
from minivllm_plugin.testing import scripted_llm
gate = threading.Event()
llm, runner = scripted_llm(options={"max_num_sequences": 1, "policies": sys.argv[1:]}, gate=gate)
streams = []
for name in ("a0", "a1", "a2", "b0"):
    params = SamplingParams(max_tokens=2, ignore_eos=True)
    streams.append(llm.submit([1, 2, 3], params, request_id=name, metadata={"tenant": name[0]}))
    assert runner.entered.wait(10)
gate.set()
for stream in streams:
    stream.result()
plugins = [(report.name, report.distribution, report.version, report.is_policy, report.errors) for report in llm.plugins()]
plugins = [plugin for plugin in plugins if plugin[0] == "fair-share"]
llm.close()
order = list(dict.fromkeys(name for batch in runner.batches for name in batch.request_ids))
print(json.dumps({"plugins": plugins, "order": order, "torch": "torch" in sys.modules}))
"""


@dataclass(frozen=True)
class Environment:
    """A virtual environment in which only the example's wheel is installed."""

    python: Path
    directory: Path

    def run(self, *arguments: str | Path, **settings: str) -> str:
        """Standard output of its python, away from the repository."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        return run(self.python, *arguments, cwd=self.directory, env=environment | settings)

    def minivllm(self, *arguments: str, **settings: str) -> str:
        """Standard output of the command line."""
        return self.run("-c", f"from minivllm_plugin.cli import main; main({list(arguments)!r})", **settings)

    def row(self, **settings: str) -> dict[str, Any]:
        """What ``minivllm plugins`` says of the example."""
        rows = json.loads(self.minivllm("plugins", "--json", **settings))["plugins"]
        (found,) = [row for row in rows if row["name"] == NAME]
        return dict(found)


def run(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that nothing is left in the repository."""
    copy = tmp_path_factory.mktemp("example") / EXAMPLE.name
    shutil.copytree(EXAMPLE, copy, ignore=shutil.ignore_patterns("__pycache__", "dist", ".*"))
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", output, source, cwd=output)
    (built,) = output.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    directory = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", directory / "venv", cwd=directory)
    scripts = directory / "venv" / ("Scripts" if os.name == "nt" else "bin")
    (site,) = [path for path in (directory / "venv").rglob("site-packages") if not path.is_symlink()]
    # addsitedir also reads the .pth files there, by which an editable installation of ours is found.
    (site / "outer.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    environment = Environment(scripts / "python", directory)
    pip = (sys.executable, "-m", "pip", "--python", environment.python)
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=directory)
    return environment


def test_the_wheel_says_what_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {"minivllm_fair_share", info}
    assert "minivllm_fair_share/py.typed" in names
    assert "[minivllm]" in entry_points
    assert f"{NAME} = minivllm_fair_share:FairShare" in entry_points
    assert any(line.startswith("minivllm-plugin") for line in metadata.get_all("Requires-Dist") or [])


@pytest.mark.slow
def test_its_own_tests_pass_against_the_installed_wheel(installed: Environment, source: Path) -> None:
    shutil.copytree(source / "tests", installed.directory / "tests")
    shutil.copy(source / "pyproject.toml", installed.directory)
    where = installed.run("-c", "import minivllm_fair_share; print(minivllm_fair_share.__file__)").strip()
    assert Path(where).is_relative_to(installed.directory / "venv")
    output = installed.run("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:cov", OMP_NUM_THREADS="1")
    assert " passed" in output
    assert "skipped" not in output


@pytest.mark.slow
def test_it_passes_the_conformance_kit(installed: Environment) -> None:
    kit = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "minivllm_plugin.testing.pytest_plugin", "--minivllm-plugin")
    output = installed.run(*kit, NAME)
    assert " passed" in output
    assert "skipped" not in output


@pytest.mark.slow
def test_it_is_discovered_and_steers_only_when_it_is_named(installed: Environment) -> None:
    loaded = [NAME, "minivllm-fair-share", "0.1.0", False, []]
    for settings in ({}, {"MINIVLLM_PLUGINS": NAME}):
        inert = json.loads(installed.run("-c", ORDER, **settings))
        assert inert == {"plugins": [loaded], "order": ["a0", "a1", "a2", "b0"], "torch": False}
    named = json.loads(installed.run("-c", ORDER, NAME))
    assert named["plugins"] == [[*loaded[:3], True, []]]
    assert named["order"] == ["a0", "b0", "a1", "a2"]
    for settings in ({"MINIVLLM_PLUGINS": ""}, {"MINIVLLM_BLOCK_PLUGINS": NAME}):
        assert json.loads(installed.run("-c", ORDER, **settings))["plugins"] == []


def test_minivllm_plugins_lists_it(installed: Environment) -> None:
    row = installed.row()
    assert (row["distribution"], row["version"], row["state"], row["origin"]) == (
        "minivllm-fair-share",
        "0.1.0",
        "loads",
        "installed",
    )
    assert row["is_policy"] is True
    assert row["error"] is None
    assert row["load_ms"] > 0
    assert {"order_waiting", "select_victims", "blocks_changed", "register_models", "register_commands"} <= set(row["hooks"])
    assert installed.row(MINIVLLM_PLUGINS="")["state"] == "not in MINIVLLM_PLUGINS"
    blocked = installed.row(MINIVLLM_BLOCK_PLUGINS=NAME)
    assert (blocked["state"], blocked["hooks"], blocked["load_ms"]) == ("blocked (MINIVLLM_BLOCK_PLUGINS)", [], None)


def test_a_broken_setting_of_its_own_stops_nobody(installed: Environment) -> None:
    row = installed.row(MINIVLLM_FAIR_SHARE=str(installed.directory / "missing.toml"))
    assert row["error"].startswith("FileNotFoundError")
    assert "generate" in installed.minivllm("--help", MINIVLLM_FAIR_SHARE=str(installed.directory / "missing.toml"))


def test_its_command_stands_in_the_help_and_runs(installed: Environment) -> None:
    assert "fair-share" in installed.minivllm("--help")
    assert "fair-share" not in installed.minivllm("--help", MINIVLLM_BLOCK_PLUGINS=NAME)
    assert installed.minivllm("fair-share") == "everybody else: 1\n"
