"""minivllm-plugin: a vLLM-style LLM engine inside the caller's own Python process.

Public names are loaded on first use: importing this package loads neither torch nor litellm.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from minivllm_plugin.config import EngineConfig
    from minivllm_plugin.engine.snapshot import EngineSnapshot
    from minivllm_plugin.registry import configure, get_llm
    from minivllm_plugin.sampling_parameters import SamplingParams
    from minivllm_plugin.serving.llm import LLM
    from minivllm_plugin.serving.outputs import CompletionOutput, RequestMetrics, RequestOutput, StreamDelta
    from minivllm_plugin.serving.stream import RequestStream

__all__ = [
    "LLM",
    "CompletionOutput",
    "EngineConfig",
    "EngineSnapshot",
    "RequestMetrics",
    "RequestOutput",
    "RequestStream",
    "SamplingParams",
    "StreamDelta",
    "__version__",
    "configure",
    "get_llm",
    "register",
]

_HOMES = {
    "EngineConfig": "minivllm_plugin.config",
    "EngineSnapshot": "minivllm_plugin.engine.snapshot",
    "configure": "minivllm_plugin.registry",
    "get_llm": "minivllm_plugin.registry",
    "SamplingParams": "minivllm_plugin.sampling_parameters",
    "LLM": "minivllm_plugin.serving.llm",
    "CompletionOutput": "minivllm_plugin.serving.outputs",
    "RequestMetrics": "minivllm_plugin.serving.outputs",
    "RequestOutput": "minivllm_plugin.serving.outputs",
    "StreamDelta": "minivllm_plugin.serving.outputs",
    "RequestStream": "minivllm_plugin.serving.stream",
}


def register(name: str = "litellm") -> Any:
    """Open the engine's door to another framework. Idempotent; returns what the adapter returns, for LiteLLM its handler.

    ``register()`` makes ``litellm.completion(model="minivllm/…")`` reach this process's engines; it needs litellm
    (``pip install "minivllm-plugin[litellm]"``) and imports it. Plugins offer further names (``minivllm_register_adapters``).

    Raises:
        ConfigError: no adapter has this name.
    """
    return importlib.import_module("minivllm_plugin.extensions.adapters").register_adapter(name)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
