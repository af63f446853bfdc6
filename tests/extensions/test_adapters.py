"""``minivllm_plugin.register(name)``: LiteLLM's adapter and those of plugins, through one hook."""

import logging
import sys
import types
from importlib.metadata import EntryPoint
from typing import Any

import pytest

import minivllm_plugin
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions.adapters import AdapterRegistry
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins import discovery


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes objects look like installed plugins."""

    def install(**plugins: Any) -> None:
        points = []
        for name, plugin in plugins.items():
            module = types.ModuleType(f"installed_{name}")
            module.plugin = plugin  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)
            points.append(EntryPoint(name, f"{module.__name__}:plugin", discovery.GROUP))
        monkeypatch.setattr(discovery, "entry_points", lambda group: points if group == discovery.GROUP else [])
        monkeypatch.setenv(discovery.ALLOW_VARIABLE, ",".join(plugins))

    return install


class Adapter:
    def __init__(self, name: str, register: Any) -> None:
        self.name, self.register = name, register

    @hookimpl
    def minivllm_register_adapters(self, registry: AdapterRegistry) -> None:
        registry.add(self.name, self.register)


def test_litellm_is_there_without_a_search_and_gives_the_same_handler_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("litellm")
    monkeypatch.setattr(discovery, "discover", lambda block=(): pytest.fail("a search of what is installed"))
    handler = minivllm_plugin.register()
    assert minivllm_plugin.register("litellm") is handler
    assert type(handler).__name__ == "MinivllmProvider"


def test_plugins_offer_further_names(installed: Any) -> None:
    installed(acme=Adapter("acme", lambda: "opened"), path=Adapter("path", "minivllm_plugin.errors:MinivllmError"))
    assert minivllm_plugin.register("acme") == "opened"
    assert type(minivllm_plugin.register("path")).__name__ == "MinivllmError"
    with pytest.raises(ConfigError, match=r"no adapter is called 'other'; known are acme, litellm, path"):
        minivllm_plugin.register("other")


def test_a_plugin_that_fails_spoils_nobody_elses(installed: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Half(Adapter):
        @hookimpl
        def minivllm_register_adapters(self, registry: AdapterRegistry) -> None:
            registry.add("half", print)
            raise RuntimeError("half done")

    installed(half=Half("half", print), thief=Adapter("litellm", print), good=Adapter("good", lambda: 1))
    with caplog.at_level(logging.WARNING):
        assert minivllm_plugin.register("good") == 1
    assert "adapters of plugin 'half' are missing: RuntimeError('half done')" in caplog.text
    assert "adapters of plugin 'thief' are missing" in caplog.text
    with pytest.raises(ConfigError, match="known are good, litellm"):
        minivllm_plugin.register("half")


def test_what_an_adapter_raises_comes_through(installed: Any) -> None:
    installed(broken=Adapter("broken", "no_such_package:register"))
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        minivllm_plugin.register("broken")


@pytest.mark.parametrize("wrong", [5, None, "module", "a b:c"])
def test_what_is_no_function_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="adapter 'x'"):
        AdapterRegistry().add("x", wrong)
