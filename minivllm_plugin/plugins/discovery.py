"""Which plugins are there: installed ones by entry point, ours by name, given ones as objects. Imports them, each in a try.

``MINIVLLM_PLUGINS`` is an allow-list: unset loads every installed plugin, empty loads none, else those named.
``MINIVLLM_BLOCK_PLUGINS`` names some never to load. Under pytest nothing loads by itself (its ``PYTEST_VERSION`` is set),
unless the allow-list is set. What fails is reported and left out; nothing here raises for an installed plugin.

Installed plugins are imported on a thread, so that one whose import hangs can be given up.
"""

import importlib
import logging
import os
import re
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from minivllm_plugin.errors import PluginError
from minivllm_plugin.hookspecs import API, version_text
from minivllm_plugin.plugins.calls import describe_error

__all__ = [
    "ALLOW_VARIABLE",
    "BLOCK_VARIABLE",
    "BUILTIN",
    "GROUP",
    "LoadedPlugin",
    "blocked_names",
    "discover",
    "load_named",
    "name_of",
    "why_incompatible",
]

logger = logging.getLogger(__name__)

GROUP = "minivllm"
ALLOW_VARIABLE = "MINIVLLM_PLUGINS"
BLOCK_VARIABLE = "MINIVLLM_BLOCK_PLUGINS"
IMPORT_PATIENCE = 60.0  # seconds that an installed plugin may take to import; one that imports torch may need ten

# Ours: part of the package, so neither an entry point nor a scan is needed to name them.
BUILTIN = {
    "priority": "minivllm_plugin.plugins.first_party.priority:PriorityPolicy",
    "sjf": "minivllm_plugin.plugins.first_party.sjf:ShortestJobFirst",
    "lpm": "minivllm_plugin.plugins.first_party.lpm:LongestPrefixMatch",
    "fair": "minivllm_plugin.plugins.first_party.fair:FairShare",
    "lcf-victim": "minivllm_plugin.plugins.first_party.lcf_victim:LeastComputedVictim",
    "slru": "minivllm_plugin.plugins.first_party.slru:SegmentedLRU",
    "prometheus": "minivllm_plugin.plugins.first_party.prometheus:PrometheusMetrics",
    "kv-events": "minivllm_plugin.plugins.first_party.kv_events:KVEventPublisher",
    "trace": "minivllm_plugin.plugins.first_party.trace:TraceRecorder",
    "otel": "minivllm_plugin.plugins.first_party.otel:RequestSpans",
}

_VERSION = re.compile(r"(==|>=|<=|!=|>|<)\s*(\d+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class LoadedPlugin:
    """One plugin, or why it could not be had.

    Attributes:
        plugin: the module or object; None when ``error`` is set.
        distribution, version: of the installed package; empty for ours and for given objects.
        origin: ``"installed"``, ``"builtin"`` or ``"given"``.
        load_seconds: what its import took.
    """

    name: str
    plugin: Any
    distribution: str = ""
    version: str = ""
    origin: str = "given"
    load_seconds: float = 0.0
    error: str | None = None

    @property
    def title(self) -> str:
        """Name and distribution, for messages."""
        return f"{self.name!r} ({self.distribution} {self.version})" if self.distribution else repr(self.name)


def discover(block: Collection[str] = ()) -> list[LoadedPlugin]:
    """Import the installed plugins that are allowed and not blocked, in the order of their names."""
    allowed = _list(os.environ.get(ALLOW_VARIABLE))
    if allowed is None and "PYTEST_VERSION" in os.environ:
        return []
    blocked = blocked_names(block)
    found = _installed()
    missing = set(allowed or ()) - {point.name for point in found} - set(BUILTIN)
    if missing:
        logger.warning("%s names %s, but no such plugin is installed", ALLOW_VARIABLE, ", ".join(sorted(missing)))
    chosen = [point for point in found if point.name not in blocked and (allowed is None or point.name in allowed)]
    loaded: dict[str, LoadedPlugin] = {}
    refused: list[LoadedPlugin] = []
    for point in chosen:
        if point.name in BUILTIN:
            refused.append(_taken(point, "minivllm-plugin's own plugin"))
        elif point.name in loaded:
            refused.append(_taken(point, f"the plugin of {loaded[point.name].distribution or 'another distribution'}"))
        else:
            loaded[point.name] = _load_entry_point(point)
    ours = [_load("builtin", name, BUILTIN[name]) for name in sorted(set(allowed or ()) & set(BUILTIN)) if name not in blocked]
    return [*loaded.values(), *ours, *refused]


def blocked_names(block: Collection[str] = ()) -> set[str]:
    """``block`` and what :data:`BLOCK_VARIABLE` names."""
    return {*block, *(_list(os.environ.get(BLOCK_VARIABLE)) or ())}


def load_named(name: str) -> LoadedPlugin:
    """One of ours, or an installed one, by name; an error stands in the result.

    Raises:
        PluginError: there is none of this name.
    """
    if name in BUILTIN:
        return _load("builtin", name, BUILTIN[name])
    installed = {point.name: point for point in reversed(_installed())}
    if name not in installed:
        if name == "fcfs":
            raise PluginError("'fcfs' is the engine's own order and no plugin: name no policy to have it")
        raise PluginError(
            f"no plugin is called {name!r}; known are {', '.join(sorted({*BUILTIN, *installed}))}. "
            "Install the package that has it, or pass the object itself"
        )
    return _load_entry_point(installed[name])


def name_of(plugin: object) -> str:
    """What a given object is called: its ``minivllm_name``, its class's name, or a module's name."""
    name = getattr(plugin, "minivllm_name", None) or getattr(plugin, "__name__", None)
    return str(name) if name else type(plugin).__name__


def why_incompatible(plugin: object) -> str | None:
    """Why this plugin needs another version of the hooks than :data:`minivllm_plugin.hookspecs.API`, or None."""
    wanted = getattr(plugin, "minivllm_api", None)
    if wanted is None:
        return None
    for clause in str(wanted).split(","):
        match = _VERSION.fullmatch(clause.strip())
        if match is None:
            return f"minivllm_api={wanted!r} is not understood; write it like '>=1.0,<2'"
        operator, major, minor = match[1], int(match[2]), int(match[3] or 0)
        if not _holds(operator, API, (major, minor)):
            return f"it needs minivllm_api {wanted}, this is {version_text()}; update minivllm-plugin or the plugin"
    return None


def _holds(operator: str, ours: tuple[int, int], theirs: tuple[int, int]) -> bool:
    return {
        "==": ours == theirs,
        "!=": ours != theirs,
        ">=": ours >= theirs,
        "<=": ours <= theirs,
        ">": ours > theirs,
        "<": ours < theirs,
    }[operator]


def _installed() -> list[EntryPoint]:
    return sorted(entry_points(group=GROUP), key=lambda point: (point.name, *_distribution(point)))


def _distribution(point: EntryPoint) -> tuple[str, str]:
    """Name and version, empty if its metadata cannot be read."""
    try:
        return (str(point.dist.name or ""), str(point.dist.version or "")) if point.dist is not None else ("", "")
    except Exception:
        return "", ""


def _load_entry_point(point: EntryPoint) -> LoadedPlugin:
    return _load("installed", point.name, point.value, *_distribution(point))


def _taken(point: EntryPoint, by: str) -> LoadedPlugin:
    error = f"{by} is called {point.name!r}, too; block one of the two, or rename its entry point"
    return LoadedPlugin(point.name, None, *_distribution(point), "installed", 0.0, error)


def _load(origin: str, name: str, target: str, distribution: str = "", version: str = "") -> LoadedPlugin:
    began = time.perf_counter()
    plugin: Any = None
    try:
        plugin = _import_patiently(name, target) if origin == "installed" else _import(target)
        error = why_incompatible(plugin)
    except (Exception, SystemExit) as failure:  # the latter from a script that is no plugin
        logger.debug("plugin %r does not load", name, exc_info=True)
        error = describe_error(failure)
    seconds = time.perf_counter() - began
    return LoadedPlugin(name, None if error else plugin, distribution, version, origin, seconds, error)


def _import(target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    plugin: Any = importlib.import_module(module_name)
    for part in attribute.split(".") if attribute else ():
        plugin = getattr(plugin, part)
    return plugin() if isinstance(plugin, type) else plugin


def _import_patiently(name: str, target: str) -> Any:
    """:func:`_import` on a thread. SystemExit and its like come as ImportError: they may end their own program only."""
    plugins: list[Any] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            plugins.append(_import(target))
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name=f"minivllm-import-{name}", daemon=True)
    thread.start()
    thread.join(IMPORT_PATIENCE)
    if plugins:
        return plugins[0]
    if not errors:
        raise TimeoutError(f"its import has not ended after {IMPORT_PATIENCE:g} s")
    if isinstance(errors[0], Exception):
        raise errors[0]
    raise ImportError(f"it raised {describe_error(errors[0])}") from errors[0]


def _list(text: str | None) -> list[str] | None:
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
