"""Plugins beside a live engine: the handle that they hold, and who tells them of its life.

Stands between the service, which knows no plugin, and the plugins room, which knows no thread.
"""

import logging
import weakref
from typing import TYPE_CHECKING

from minivllm_plugin.engine.snapshot import EngineSnapshot
from minivllm_plugin.errors import PluginError
from minivllm_plugin.plugins.facade import EngineHandle
from minivllm_plugin.plugins.manager import EnginePlugins

if TYPE_CHECKING:
    from minivllm_plugin.extensions.metrics import Metric
    from minivllm_plugin.serving.service import EngineService

__all__ = ["PluginLifecycle"]

logger = logging.getLogger(__name__)


class PluginLifecycle:
    """Tells the plugins of one engine that it serves, dies, has stopped. Engine thread."""

    def __init__(self, plugins: EnginePlugins) -> None:
        self._plugins = plugins
        self._handle: EngineHandle | None = None

    def started(self, service: "EngineService") -> None:
        """
        Raises:
            PluginError: a plugin failed, and errors are to be raised.
        """
        self._handle = _handle(service, self._plugins)
        self._plugins.started(self._handle)

    def failed(self, error: BaseException) -> None:
        self._plugins.failed(error)

    def stopped(self, error: BaseException | None) -> None:
        if self._handle is None:  # it never served
            return
        try:
            self._plugins.stopped(self._handle, error)
        except PluginError:
            logger.exception("a plugin failed while engine %r stopped", self._handle.name)


def _handle(service: "EngineService", plugins: EnginePlugins) -> EngineHandle:
    reference = weakref.ref(service)  # a plugin that keeps its handle must not keep weights and cache

    def snapshot() -> EngineSnapshot | None:
        service = reference()
        return service.latest_snapshot if service is not None else None

    def abort(request_id: str) -> None:
        service = reference()
        if service is not None:
            service.abort(request_id)

    def metrics() -> "list[Metric]":
        latest = snapshot()
        return [] if latest is None else plugins.extensions.metrics.collect(latest.state)

    return EngineHandle(service.name, snapshot, abort, metrics, plugins.totals)
