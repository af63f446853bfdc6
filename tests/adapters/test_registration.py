"""Registering: once or often, after others have re-assigned LiteLLM's list, by the proxy's loader, without LiteLLM."""

import importlib
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import litellm
import pytest
from litellm.proxy.types_utils.utils import get_instance_fn

import minivllm_adapters
import minivllm_plugin
from minivllm_adapters import litellm_provider
from minivllm_adapters.errors import LiteLLMUnavailableError
from minivllm_adapters.handler import MinivllmProvider
from minivllm_plugin.models.catalog import CATALOG

ADAPTERS = Path(litellm_provider.__file__).parents[1]
MESSAGES = [{"role": "user", "content": "hello"}]


def _ours() -> list[Any]:
    return [entry["custom_handler"] for entry in litellm.custom_provider_map if entry["provider"] == "minivllm"]


def test_registering_twice_makes_one_entry() -> None:
    handler = minivllm_plugin.register()
    assert minivllm_plugin.register() is handler
    assert _ours() == [handler]
    assert isinstance(handler, litellm.CustomLLM)  # LiteLLM ignores anything else
    assert "minivllm" in litellm.provider_list
    assert litellm.get_supported_openai_params("x", custom_llm_provider="minivllm")


def test_registering_again_after_the_list_was_replaced() -> None:
    class Other(litellm.CustomLLM):
        pass

    handler = minivllm_plugin.register()
    other = Other()
    litellm.custom_provider_map = [{"provider": "other", "custom_handler": other}]
    assert minivllm_plugin.register() is handler
    assert [entry["provider"] for entry in litellm.custom_provider_map] == ["other", "minivllm"]
    litellm.custom_provider_map = []
    assert minivllm_plugin.register() is handler


def test_registering_keeps_the_list_object_that_others_hold() -> None:
    held = litellm.custom_provider_map
    minivllm_plugin.register()
    assert held is litellm.custom_provider_map
    assert len(held) == 1


def test_a_subclass_stays_and_a_stranger_under_our_name_goes() -> None:
    class Mine(MinivllmProvider):
        pass

    mine = Mine()
    litellm.custom_provider_map = [{"provider": "minivllm", "custom_handler": mine}]
    assert minivllm_plugin.register() is mine
    litellm.custom_provider_map = [{"provider": "minivllm", "custom_handler": litellm.CustomLLM()}]
    assert _ours() != [minivllm_adapters.provider]
    assert minivllm_plugin.register() is minivllm_adapters.provider
    assert _ours() == [minivllm_adapters.provider]


def test_registering_from_many_threads() -> None:
    barrier = threading.Barrier(8)
    got: list[Any] = []

    def register() -> None:
        barrier.wait(30)
        got.append(minivllm_plugin.register())

    threads = [threading.Thread(target=register) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(map(id, got)) == {id(minivllm_adapters.provider)}
    assert set(map(id, _ours())) == {id(minivllm_adapters.provider)}


@pytest.mark.parametrize("path", ["minivllm_adapters.provider", "minivllm_adapters.litellm_provider.provider"])
@pytest.mark.parametrize("beside", ["the package", "the source", "nothing"])
def test_the_proxy_finds_the_one_instance(path: str, beside: str, tmp_path: Path) -> None:
    """LiteLLM's loader executes a file that lies beside its configuration as a second, nameless module."""
    folder = {"the package": ADAPTERS, "the source": ADAPTERS / "minivllm_adapters", "nothing": tmp_path}[beside]
    found = get_instance_fn(path, str(folder / "config.yaml"))
    assert found is minivllm_adapters.provider
    assert found is minivllm_plugin.register()
    assert type(found) is MinivllmProvider


def test_unknown_attributes_of_the_lazy_modules() -> None:
    for module in (minivllm_adapters, litellm_provider):
        with pytest.raises(AttributeError, match="nonsense"):
            module.nonsense  # noqa: B018
        assert module.provider is importlib.import_module("minivllm_adapters.handler").provider


def test_without_registration_litellm_does_not_know_the_provider() -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(model="nobodyknows/fake", messages=MESSAGES)


def test_a_model_name_that_litellm_would_send_elsewhere_is_not_in_the_catalog(provider: MinivllmProvider, registry: Any) -> None:
    """LiteLLM looks for some words in a model's name before it looks at the provider; see docs/litellm.md."""
    names = [*CATALOG, *(entry.hub_id for entry in CATALOG.values())]
    registry.llms |= dict.fromkeys(names, registry.llms["fake"])
    for name in names:
        assert litellm.completion(model=f"minivllm/{name}", messages=MESSAGES).model == name


# --- in a process of its own --------------------------------------------------------------------------------------------------


def run_python(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, **environment},
    )


def test_importing_the_adapters_loads_neither_litellm_nor_torch() -> None:
    result = run_python("""
        import sys
        import minivllm_adapters, minivllm_adapters.litellm_provider, minivllm_adapters.params, minivllm_adapters.loading
        import minivllm_adapters.autoload, minivllm_adapters.errors, minivllm_adapters.deadlines
        assert not {"litellm", "torch", "transformers", "httpx"} & set(sys.modules), sorted(sys.modules)
    """)
    assert result.returncode == 0, result.stderr


def test_registering_does_not_load_torch() -> None:
    result = run_python("""
        import sys
        import minivllm_plugin
        minivllm_plugin.register()
        assert "torch" not in sys.modules
    """)
    assert result.returncode == 0, result.stderr


def test_litellm_missing_or_broken_or_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "litellm", None)  # import raises ModuleNotFoundError
    with pytest.raises(LiteLLMUnavailableError, match="pip install") as caught:
        litellm_provider.register()
    assert isinstance(caught.value, ImportError)
    assert caught.value.name == "litellm"
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.108.14")
    with pytest.raises(LiteLLMUnavailableError, match=r"1\.108\.14 is too old.*1\.109"):
        litellm_provider.register()

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(LiteLLMUnavailableError, match="not installed"):
        litellm_provider.register()
