"""What a plugin may hold of an engine: its settings before it starts, and a handle while it runs."""

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any, NamedTuple

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import ConfigError

if TYPE_CHECKING:
    from minivllm_plugin.engine.snapshot import EngineSnapshot
    from minivllm_plugin.extensions.metrics import Metric

__all__ = ["ConfigDraft", "EngineHandle", "HookTotals"]


class HookTotals(NamedTuple):
    """What one hook of one plugin did so far. ``hook`` without the prefix; ``total_seconds`` on the engine thread."""

    plugin: str
    hook: str
    num_calls: int
    num_errors: int
    total_seconds: float


class ConfigDraft:
    """The fields of an :class:`~minivllm_plugin.config.EngineConfig`, to be read and set. Unknown names are refused.

    Raises:
        ConfigError: on setting a name that is no setting.
    """

    def __init__(self, config: EngineConfig) -> None:
        for field in fields(config):
            object.__setattr__(self, field.name, getattr(config, field.name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__:
            raise ConfigError(f"there is no engine setting {name!r}; known are {', '.join(sorted(self.__dict__))}")
        object.__setattr__(self, name, value)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"there is no engine setting {name!r}; known are {', '.join(sorted(self.__dict__))}")

    def finished(self) -> EngineConfig:
        """The settings, checked again."""
        return EngineConfig(**self.__dict__)


class EngineHandle:
    """A running engine as plugins may use it, from any thread. Does not keep it alive.

    Args:
        name: of the model.
        snapshot, abort, metrics, plugin_totals: what the engine answers with.
    """

    __slots__ = ("_abort", "_metrics", "_plugin_totals", "_snapshot", "name")

    def __init__(
        self,
        name: str,
        snapshot: "Callable[[], EngineSnapshot | None]",
        abort: Callable[[str], None],
        metrics: "Callable[[], list[Metric]]",
        plugin_totals: Callable[[], list[HookTotals]] = list,
    ) -> None:
        self.name = name
        self._snapshot = snapshot
        self._abort = abort
        self._metrics = metrics
        self._plugin_totals = plugin_totals

    def snapshot(self) -> "EngineSnapshot | None":
        """Queues, pool and totals, at most 50 ms old; None once the engine is gone."""
        return self._snapshot()

    def abort(self, request_id: str) -> None:
        """End a request before the next step. Never blocks; unknown ids are ignored."""
        self._abort(request_id)

    def metrics(self) -> "list[Metric]":
        """What the plugins' metrics say now."""
        return self._metrics()

    def plugin_totals(self) -> list[HookTotals]:
        """Calls, errors and seconds of every hook of every plugin that was called so far."""
        return self._plugin_totals()

    def __repr__(self) -> str:
        return f"EngineHandle({self.name!r})"
