"""Doors to the engine from other frameworks: a name -> the function that opens it, behind ``minivllm_plugin.register(name)``.

A framework is imported only by the call. LiteLLM's adapter enters through the same hook as anybody's; being ours, its plugin is
known without a search of what is installed.
"""

import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions.dotted import check_path, import_path
from minivllm_plugin.extensions.registry import Registry

if TYPE_CHECKING:
    from minivllm_plugin.plugins.discovery import LoadedPlugin

__all__ = ["AdapterRegistry", "register_adapter"]

logger = logging.getLogger(__name__)

OURS = "minivllm_adapters.plugin"  # by name: the adapters build on this package, so it must not import them


class AdapterRegistry(Registry[Callable[[], Any] | str]):
    """Adapter name -> what registers it."""

    kind = "adapter"

    def add(self, name: str, register: Callable[[], Any] | str) -> None:
        """Offer a door under ``name``.

        Args:
            register: a function without arguments, or its path ``"package.module:function"``. It may be called any number of
                times, from any thread; what it returns is what ``minivllm_plugin.register(name)`` returns.

        Raises:
            ConfigError: the name is taken, or this is neither.
        """
        if isinstance(register, str):
            check_path(register, f"the function of {self.kind} {name!r}")
        elif not callable(register):
            raise ConfigError(f"{self.kind} {name!r} must be a function or its path 'module:function', got {register!r:.100}")
        self._put(name, register)

    def register(self, name: str) -> Any:
        """Open the door ``name``. What its function raises comes through, import errors too.

        Raises:
            ConfigError: there is none; those that there are are listed.
        """
        found = self.get(name)
        if found is None:
            known = ", ".join(sorted(self.names())) or "none"
            raise ConfigError(
                f"no adapter is called {name!r}; known are {known}. Is its package installed, and its plugin loaded?"
            )
        function = import_path(found) if isinstance(found, str) else found
        return function()


def register_adapter(name: str) -> Any:
    """What ``minivllm_plugin.register(name)`` does: ask our own plugin, then the installed ones, and open the door.

    Raises:
        ConfigError: nobody offers ``name``.
    """
    from minivllm_plugin.plugins.discovery import LoadedPlugin, discover

    registry = AdapterRegistry()
    _ask([LoadedPlugin("litellm", importlib.import_module(OURS), origin="builtin")], registry)
    if name not in registry:
        _ask(discover(), registry)
    return registry.register(name)


def _ask(plugins: "list[LoadedPlugin]", registry: AdapterRegistry) -> None:
    from minivllm_plugin.extensions.contributions import implementations

    for loaded, add in implementations("minivllm_register_adapters", plugins):
        try:
            with registry.owned_by(loaded.name):
                add(registry)
        except Exception as error:  # a plugin's own code
            registry.discard_owner(loaded.name)
            logger.warning("the adapters of plugin %s are missing: %r", loaded.title, error, exc_info=error)
