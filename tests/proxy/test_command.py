"""``minivllm serve`` before anything is served: settings, the configuration that it writes, and refusals. No server runs."""

import importlib
import socket
from typing import Any

import pytest
import yaml

from minivllm_adapters import proxy
from minivllm_adapters.proxy_config import ProxySettings, is_loopback, proxy_config
from minivllm_plugin.cli import main
from minivllm_plugin.errors import ConfigError


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(["serve", *arguments])
    except SystemExit as error:
        code = int(error.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LITELLM_MASTER_KEY", raising=False)


def test_the_configuration_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(
        capsys, "smollm2-135m", "mine=./a=b.gguf", "--print-config", "--timeout", "5", "--master-key", "sk-something-long"
    )
    assert code == 0
    config = yaml.safe_load(out)
    deployments = {entry["model_name"]: entry["litellm_params"]["model"] for entry in config["model_list"]}
    assert deployments == {"smollm2-135m": "minivllm/smollm2-135m", "mine": "minivllm/./a=b.gguf"}
    assert config["general_settings"]["master_key"] == "os.environ/LITELLM_MASTER_KEY"
    assert "sk-something-long" not in out
    assert config["general_settings"]["cancel_on_disconnect"] is True
    assert config["general_settings"]["background_health_checks"] is False
    assert config["router_settings"] == {"num_retries": 0, "disable_cooldowns": True, "timeout": 5.0}


def test_a_key_is_only_left_out_on_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    local = yaml.safe_load(_run(capsys, "m", "--print-config")[1])["general_settings"]
    assert local["dangerously_permit_weak_or_unset_master_key"] is True
    assert "master_key" not in local
    far = yaml.safe_load(_run(capsys, "m", "--print-config", "--host", "0.0.0.0")[1])["general_settings"]
    assert "dangerously_permit_weak_or_unset_master_key" not in far
    assert "master_key" in far
    with pytest.raises(ConfigError, match="master key"):
        ProxySettings(models={"m": "m"}, host="0.0.0.0")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *((host, True) for host in ("127.0.0.1", "127.8.0.1", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")),
    ],
)
def test_what_counts_as_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("m", "--master-key", "sk-1234"), "master key"),
        (("m", "--master-key", " "), "master key"),
        (("m", "m"), "'m' is given twice"),
        (("m", "--max-request-mb", "0"), "max_request_mb"),
        (("m", "--timeout", "-1"), "timeout"),
        (("m", "--drain-seconds", "0"), "drain_seconds"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused_by_name(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    code, _, err = _run(capsys, *arguments)
    assert code == 1
    assert named in err


def test_a_port_in_use_is_told_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxy, "_litellm_app", lambda settings: pytest.fail("LiteLLM was imported first"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, _, err = _run(capsys, "m", "--port", str(taken.getsockname()[1]))
    assert code == 1
    assert "--port" in err


def test_missing_packages_are_named_with_the_remedy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name == proxy.LITELLM_APP:
            raise ModuleNotFoundError("No module named 'websockets'", name="websockets")
        return real(name, package)

    for name in ("CONFIG_FILE_PATH", "GRACEFUL_SHUTDOWN_TIMEOUT", *proxy.QUIET):
        monkeypatch.setenv(name, "x")  # so that what is set there is undone
    monkeypatch.setattr(importlib, "import_module", without)
    code, _, err = _run(capsys, "m", "--port", "0")
    assert code == 1
    assert "websockets" in err
    assert "minivllm-plugin[serve]" in err


def test_metrics_are_left_out_without_their_package(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "has_metrics", lambda: False)
    config = yaml.safe_load(_run(capsys, "m", "--print-config")[1])
    assert "prometheus" not in config["litellm_settings"]["callbacks"]
    assert "prometheus" in proxy_config(ProxySettings(models={"m": "m"}))["litellm_settings"]["callbacks"]


def test_the_settings_hide_the_key() -> None:
    assert "sk-a-secret-key" not in repr(ProxySettings(models={"m": "m"}, master_key="sk-a-secret-key"))
