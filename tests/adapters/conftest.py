"""Fixtures of the adapter's tests: a fake engine behind the real provider behind the real LiteLLM."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_llm
import live_engine
import pytest
from eventually import eventually

THIRD_PARTY_WARNINGS = (
    # LiteLLM's lazily imported modules use TypedDict ReadOnly, which pydantic comments on.
    "ignore:Items? .* on TypedDict class .* using the `ReadOnly` qualifier:UserWarning",
    # LiteLLM looks at every attribute of a chunk to see whether it is empty, also at those that pydantic deprecates.
    "ignore:Accessing the 'model_(computed_)?fields' attribute on the instance is deprecated:DeprecationWarning",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Warnings are errors here, except these of third parties."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            for warning in THIRD_PARTY_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def _litellm_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM keeps its providers, prices and switches in module globals; each test gets its own."""
    import litellm

    for name, value in {
        "custom_provider_map": [],
        "model_cost": dict(litellm.model_cost),
        "success_callback": [],
        "failure_callback": [],
        "_async_success_callback": [],
        "_async_failure_callback": [],
        "callbacks": [],
        "drop_params": False,
        "num_retries": None,
        "suppress_debug_info": True,
    }.items():
        monkeypatch.setattr(litellm, name, value)


@pytest.fixture
def llm() -> Any:
    """The engine behind ``minivllm/fake``."""
    return fake_llm.FakeLLM()


@pytest.fixture
def registry(llm: Any) -> Any:
    registry = fake_llm.FakeRegistry(fake=llm)
    registry.llms["org/name"] = llm
    return registry


@pytest.fixture
def provider(registry: Any) -> Iterator[Any]:
    """The provider under test, registered with LiteLLM; no request may be live when the test ends."""
    import litellm

    from minivllm_adapters.handler import MinivllmProvider

    provider = MinivllmProvider(registry)
    litellm.custom_provider_map.append({"provider": "minivllm", "custom_handler": provider})
    yield provider
    registry.gate.set()
    eventually(lambda: not any(llm.live for llm in registry.llms.values()))


@pytest.fixture
def live() -> Iterator[Any]:
    """A live engine behind ``minivllm/live``; when the test ends it must be idle."""
    import litellm

    from minivllm_adapters.handler import MinivllmProvider

    live = live_engine.Live()
    litellm.custom_provider_map.append({"provider": "minivllm", "custom_handler": MinivllmProvider(live)})
    yield live
    if live.engines and live.llm.is_healthy:
        eventually(live.idle)
    for llm, _ in live.engines:
        llm.close()


@pytest.fixture
def no_logging_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM's worker for asynchronous callbacks serves one event loop at a time; with several at once its tasks fail and
    are reported, though no answer suffers. That is not under test here, so the tasks are dropped."""
    from litellm.litellm_core_utils.logging_worker import GLOBAL_LOGGING_WORKER

    monkeypatch.setattr(GLOBAL_LOGGING_WORKER, "ensure_initialized_and_enqueue", lambda async_coroutine: async_coroutine.close())
