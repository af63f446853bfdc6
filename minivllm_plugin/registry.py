"""Model name -> live engine: the only process global, and its lock. Adapters ask here, so that all of them share one engine.

Loading runs outside the lock, one load per name; whoever asks meanwhile waits for it. A dead or closed engine is replaced
at the next call.
"""

import threading
from concurrent.futures import Future
from typing import Any

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.models.catalog import catalog_entry
from minivllm_plugin.serving.llm import LLM

__all__ = ["close", "close_all", "configure", "get_llm", "loaded"]

_lock = threading.Lock()
_engines: dict[str, "Future[LLM]"] = {}
_options: dict[str, dict[str, Any]] = {}


def configure(name: str, **options: Any) -> None:
    """Set the engine options that the first use of ``name`` will load with.

    Raises:
        ConfigError: an option is unknown or impossible, or the engine is loaded already.
    """
    EngineConfig.from_options(name, options)
    with _lock:
        _set_options(_key(name), options)


def get_llm(name: str, **options: Any) -> LLM:
    """The live engine of ``name``, loaded on first use. From any thread.

    Args:
        options: engine options, ``model`` among them if ``name`` is to be an alias; once the engine is loaded they must
            equal those it was loaded with.

    Raises:
        ConfigError, ModelError: it cannot be loaded; the next call tries again.
    """
    name = _key(name)
    if options:
        EngineConfig.from_options(name, options)
    with _lock:
        if options:  # under the same lock as the claim: two first callers with other options must not load each other's
            _set_options(name, options)
        future = _engines.get(name)
        mine = future is None or _replaceable(future)
        if mine:
            future = _engines[name] = Future()
        chosen = dict(_options.get(name, {}))
    assert future is not None
    if mine:
        try:
            future.set_result(LLM(chosen.pop("model", name), **chosen))
        except BaseException as error:
            future.set_exception(error)
            raise
    return future.result()


def loaded() -> dict[str, LLM]:
    """The engines that serve now, by name; catalog names as the catalog spells them."""
    with _lock:
        futures = dict(_engines)
    return {name: future.result() for name, future in futures.items() if future.done() and not _replaceable(future)}


def close(name: str) -> None:
    """Close the engine of ``name`` and forget its options. Unknown names are ignored."""
    name = _key(name)
    with _lock:
        future = _engines.pop(name, None)
        _options.pop(name, None)
    if future is not None and future.exception() is None:
        future.result().close()


def close_all() -> None:
    """Close every engine."""
    with _lock:
        names = list(_engines)
    for name in names:
        close(name)


def _key(name: str) -> str:
    """One spelling for the spellings of a catalog name, or one model would be loaded twice."""
    if not isinstance(name, str):
        raise ConfigError(f"a model's name must be a string, got {name!r}")
    entry = catalog_entry(name)
    return entry.name if entry is not None else name


def _set_options(name: str, options: dict[str, Any]) -> None:
    """Needs the lock."""
    future = _engines.get(name)
    if future is not None and not _replaceable(future) and options != _options.get(name, {}):
        raise ConfigError(f"{name!r} is loaded with other options already; call minivllm_plugin.registry.close({name!r}) first")
    _options[name] = dict(options)


def _replaceable(future: "Future[LLM]") -> bool:
    """It failed to load, or what it loaded no longer serves."""
    return future.done() and (future.exception() is not None or not future.result().is_healthy)
