"""The wheel: what is in it, and that it works in an environment where nothing else of ours is."""

import os
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("minivllm_plugin", "minivllm_kernels", "minivllm_adapters", "minivllm_ui")
SMOKE = """
import importlib.util, sys
import minivllm_plugin
assert "torch" not in sys.modules
assert importlib.util.find_spec("litellm") is None
assert "site-packages" in minivllm_plugin.__file__
from minivllm_plugin import LLM, SamplingParams
llm = LLM("smollm2-135m", load_format="dummy", num_blocks=16)
output = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=5, ignore_eos=True), use_tqdm=False)[0]
llm.close()
print("TOKENS", len(output.outputs[0].token_ids))
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command away from the repository; its standard output. Coverage and PYTHONPATH stay here."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("COV_", "PYTHONPATH"))}
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution, which is built from the repository."""
    output = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", output, ROOT, cwd=output)
    (built,) = output.glob("*.whl")
    return built


def test_the_wheel_holds_four_typed_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    assert {name.split("/")[0] for name in names} == {*PACKAGES, info}
    assert all(f"{package}/py.typed" in names for package in PACKAGES)
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]
    assert f"{info}/licenses/LICENSE" in names
    assert metadata["License-Expression"] == "Apache-2.0"
    assert {"litellm", "ui", "gpu"} <= set(metadata.get_all("Provides-Extra"))
    assert "minivllm = minivllm_plugin.cli:main" in entry_points


def test_every_source_file_is_in_the_wheel(wheel: Path) -> None:
    folders = (ROOT / "minivllm_plugin", *(ROOT / folder for folder in ("kernels", "adapters", "ui")))
    sources = {
        path.relative_to(folder if folder.name in ("kernels", "adapters", "ui") else ROOT).as_posix()
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        assert sources - set(archive.namelist()) == set()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    scripts = tmp_path / "venv" / ("Scripts" if os.name == "nt" else "bin")
    pip = (sys.executable, "-m", "pip", "--python", scripts / "python", "install", "-q")
    try:  # what is imported below is compiled then; all of torch need not be
        run(*pip, "--no-compile", "-c", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    except AssertionError as error:
        if os.environ.get("CI") or "No matching distribution" not in str(error):
            raise
        pytest.skip("pip reaches no index here, and the wheel's dependencies come from one")
    assert "generate" in run(scripts / "minivllm", "--help", cwd=tmp_path)
    assert "smollm2-135m" in run(scripts / "minivllm", "models", cwd=tmp_path)
    assert run(scripts / "python", "-c", SMOKE, cwd=tmp_path).strip().endswith("TOKENS 5")
