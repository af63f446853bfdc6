"""The adapters as a plugin: what its entry point ``litellm`` in the group ``minivllm`` names. Importing it loads no framework."""

from typing import TYPE_CHECKING

from minivllm_plugin.hookspecs import hookimpl

if TYPE_CHECKING:
    from minivllm_plugin.extensions.adapters import AdapterRegistry

__all__ = ["minivllm_register_adapters"]


@hookimpl
def minivllm_register_adapters(registry: "AdapterRegistry") -> None:
    """Offer ``minivllm_plugin.register("litellm")``."""
    registry.add("litellm", "minivllm_adapters.litellm_provider:register")
