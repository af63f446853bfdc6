"""From a model's name to its live engine, within a deadline. The registry owns the engines; this only waits for it.

A load can take minutes (a download) and the registry cannot be interrupted, so a load runs on a thread of its own, named
``minivllm-load-<name>``, which ends with the load. Callers of one name share it. A caller whose deadline passes leaves; the
load goes on and the next caller finds the model. No event loop thread ever loads or waits.
"""

import asyncio
import importlib
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol, cast

from minivllm_adapters.deadlines import Deadline
from minivllm_plugin.errors import RequestTimeoutError

if TYPE_CHECKING:
    from minivllm_plugin.serving.llm import LLM

__all__ = ["ModelLoads", "Registry"]


class Registry(Protocol):
    """What is needed of :mod:`minivllm_plugin.registry`."""

    def get_llm(self, name: str) -> "LLM":
        """The live engine of ``name``, loaded if it is not; a dead or closed one is replaced."""

    def loaded(self) -> "dict[str, LLM]":
        """The engines that are there now."""


class ModelLoads:
    """The loads in progress. Thread safe; holds no engine.

    Args:
        registry: where engines come from; None takes :mod:`minivllm_plugin.registry` at the first call.
    """

    def __init__(self, registry: Registry | None = None) -> None:
        self._registry = registry
        self._in_progress: dict[str, Future[LLM]] = {}
        self._lock = threading.Lock()  # guards the dict only; never held while loading

    def open(self, name: str, deadline: Deadline) -> "LLM":
        """The engine of ``name``; blocks while it loads.

        Raises:
            ModelError, ConfigError: as the registry raised them.
            RequestTimeoutError: the deadline passed first.
        """
        load = self._find_or_start(name)
        if not isinstance(load, Future):
            return load
        try:
            return load.result(deadline.remaining())
        except TimeoutError as error:
            _raise_own(load)
            raise _still_loading(name, deadline) from error

    async def aopen(self, name: str, deadline: Deadline) -> "LLM":
        """The same without blocking the event loop."""
        load = self._find_or_start(name)
        if not isinstance(load, Future):
            return load
        try:
            async with asyncio.timeout(deadline.remaining()):
                return await asyncio.wrap_future(load)
        except TimeoutError as error:
            _raise_own(load)
            raise _still_loading(name, deadline) from error

    def _ready(self, name: str) -> "LLM | None":
        """The engine, if it is there and no work is needed to get at it; importing the registry is such work."""
        if self._registry is None:
            return None
        llm = self._registry.loaded().get(name)
        return llm if llm is not None and llm.is_healthy else None

    def _find_or_start(self, name: str) -> "LLM | Future[LLM]":
        """The engine if it is there, else the load of ``name`` that is going on, else a new one."""
        with self._lock:
            load = self._in_progress.get(name)
            if load is not None:
                return load
            if (llm := self._ready(name)) is not None:
                return llm
            load = self._in_progress[name] = Future()
            load.set_running_or_notify_cancel()  # so that one caller's cancelled task cannot cancel the load of all
        # A daemon: a process that wants to exit does not wait for a download.
        threading.Thread(target=self._load, args=(name, load), name=f"minivllm-load-{name}", daemon=True).start()
        return load

    def _load(self, name: str, load: "Future[LLM]") -> None:
        try:
            llm = self._get_registry().get_llm(name)
        except BaseException as error:  # delivered to every waiter; nobody else looks at this thread
            self._forget(name)
            load.set_exception(error)
        else:
            self._forget(name)
            load.set_result(llm)

    def _forget(self, name: str) -> None:
        """Before the result is set: a caller that comes after a failure starts a new load."""
        with self._lock:
            del self._in_progress[name]

    def _get_registry(self) -> Registry:
        if self._registry is None:
            self._registry = cast(Registry, importlib.import_module("minivllm_plugin.registry"))
        return self._registry


def _raise_own(load: "Future[LLM]") -> None:
    """A load may itself fail with a TimeoutError; that is its result, and not our deadline."""
    if load.done() and (error := load.exception()) is not None:
        raise error


def _still_loading(name: str, deadline: Deadline) -> RequestTimeoutError:
    return deadline.expired(f"model {name!r} was loading (the load goes on; a later call finds it)")
