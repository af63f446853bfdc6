"""Adapters: minivllm-plugin behind the interfaces of other frameworks. LiteLLM for now.

``minivllm_adapters.provider`` is LiteLLM's handler object, imported on first access. Importing this package is free.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm_adapters.handler import provider as provider

__all__ = ["provider"]


def __getattr__(name: str) -> object:
    if name == "provider":
        return importlib.import_module("minivllm_adapters.handler").provider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
