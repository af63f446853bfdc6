"""What the first-party observers share: they belong to one engine, and some of them need a package that is optional.

Whether a file, port or endpoint can be had is checked in ``minivllm_configure``, where a failure stops the engine with a clear
message; it is taken in ``minivllm_engine_started`` and given back in ``minivllm_engine_stopped``, so that an engine that fails to
load leaves nothing open.
"""

import importlib

from minivllm_plugin.errors import ConfigError, PluginError
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.plugins.facade import ConfigDraft, EngineHandle

__all__ = ["SingleEngine", "require"]


def require(module: str, *, package: str, extra: str) -> None:
    """Import an optional dependency.

    Raises:
        PluginError: it is not installed, or does not load; names the extra to install.
    """
    try:
        importlib.import_module(module)
    except ImportError as error:
        raise PluginError(
            f"this plugin needs the package {package}, which cannot be imported ({error}); pip install 'minivllm-plugin[{extra}]'"
        ) from error


class SingleEngine:
    """Base of observers that hold the state of one engine: numbers, a file, a socket. Given to a second one, they refuse.

    Overriding methods call these first. ``minivllm_engine_stopped`` must ignore any engine but :attr:`_handle`.
    """

    _handle: EngineHandle | None = None

    @hookimpl
    def minivllm_configure(self, config: ConfigDraft) -> None:
        """
        Raises:
            ConfigError: this object belongs to an engine already.
        """
        if self._handle is not None:
            name = type(self).__name__
            raise ConfigError(
                f"this {name} belongs to engine {self._handle.name!r} already and holds its state; make a new one for each engine"
            )

    @hookimpl
    def minivllm_engine_started(self, engine: EngineHandle) -> None:
        """
        Raises:
            PluginError: two engines started with this object at once.
        """
        if self._handle is not None:
            raise PluginError(f"this {type(self).__name__} belongs to engine {self._handle.name!r} already")
        self._handle = engine
