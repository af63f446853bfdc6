"""The LiteLLM examples run, and the proxy's configuration leads to our handler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from litellm.proxy.types_utils.utils import get_instance_fn

import minivllm_adapters

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "max_tokens", "expected"),
    [
        ("litellm_async.py", 3, "France:"),
        ("litellm_router.py", 3, "prompt tokens ->"),
        ("litellm_tools.py", 200, "and advises: Advice(city="),
    ],
)
def test_an_example_runs(smollm2_gguf: Path, name: str, max_tokens: int, expected: str) -> None:
    command = [sys.executable, str(EXAMPLES / name), "--max-tokens", str(max_tokens)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=os.environ)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert expected in done.stdout


def test_the_proxy_configuration_leads_to_our_handler() -> None:
    path = EXAMPLES / "litellm_proxy.yaml"
    config = yaml.safe_load(path.read_text("utf-8"))
    [entry] = config["litellm_settings"]["custom_provider_map"]
    assert entry["provider"] == "minivllm"
    assert get_instance_fn(entry["custom_handler"], str(path)) is minivllm_adapters.provider
    assert all(model["litellm_params"]["model"].startswith("minivllm/") for model in config["model_list"])
