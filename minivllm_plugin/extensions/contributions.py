"""Hooks that are asked outside an engine: adapters and commands. Each plugin is asked on its own, so that none spoils another's.

An engine's registries are filled by its plugin manager instead.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pluggy

from minivllm_plugin import hookspecs

if TYPE_CHECKING:
    from minivllm_plugin.plugins.discovery import LoadedPlugin

__all__ = ["implementations"]

logger = logging.getLogger(__name__)


def implementations(hook: str, plugins: "Iterable[LoadedPlugin]") -> "Iterator[tuple[LoadedPlugin, Callable[[Any], None]]]":
    """Each plugin that implements ``hook``, a hook of one argument, with its implementation as a function of that."""
    for loaded in plugins:
        if loaded.error is not None:
            logger.debug("plugin %s is left out: %s", loaded.title, loaded.error)
            continue
        manager = pluggy.PluginManager(hookspecs.PROJECT)
        manager.add_hookspecs(hookspecs)
        try:
            manager.register(loaded.plugin, loaded.name)
        except (pluggy.PluginValidationError, ValueError) as error:
            logger.warning("plugin %s cannot be used: %s", loaded.title, error)
            continue
        for found in getattr(manager.hook, hook).get_hookimpls():
            yield loaded, partial(_call, found)


def _call(found: pluggy.HookImpl, argument: Any) -> None:
    found.function(*[argument] * len(found.argnames))
