"""The LiteLLM examples run, and the proxy's configuration leads to our handler."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import yaml
from litellm.proxy.types_utils.utils import get_instance_fn
from side_by_side import started

import minivllm_adapters

EXAMPLES = Path(__file__).parents[2] / "examples"


MAX_TOKENS = {"litellm_async.py": 3, "litellm_router.py": 3, "litellm_tools.py": 200}
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def done(request: pytest.FixtureRequest, smollm2_gguf: Path) -> Iterator[dict[str, "Future[Done]"]]:
    """The examples by name, on their way."""

    def run(name: str) -> Done:
        command = [sys.executable, str(EXAMPLES / name), "--max-tokens", str(MAX_TOKENS[name])]
        return subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=os.environ)

    with started(request, "name", run) as futures:
        yield futures


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("litellm_async.py", "France:"),
        ("litellm_router.py", "prompt tokens ->"),
        ("litellm_tools.py", "and advises: Advice(city="),
    ],
)
def test_an_example_runs(done: dict[str, "Future[Done]"], name: str, expected: str) -> None:
    result = done[name].result()
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert expected in result.stdout


def test_the_proxy_configuration_leads_to_our_handler() -> None:
    path = EXAMPLES / "litellm_proxy.yaml"
    config = yaml.safe_load(path.read_text("utf-8"))
    [entry] = config["litellm_settings"]["custom_provider_map"]
    assert entry["provider"] == "minivllm"
    assert get_instance_fn(entry["custom_handler"], str(path)) is minivllm_adapters.provider
    assert all(model["litellm_params"]["model"].startswith("minivllm/") for model in config["model_list"])
