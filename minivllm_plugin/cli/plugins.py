"""``minivllm plugins``: which plugins there are, what they implement, and why one does not work. Loads no model and no torch.

Every plugin is imported and registered by itself, as an engine would do it, so that a broken one is a line in the table.
Those that the environment variables exclude are listed and not imported.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from minivllm_plugin.plugins.discovery import LoadedPlugin

__all__ = ["PluginRow", "list_plugins", "plugins"]

TABLE_WIDTH_OFF_TERMINAL = 200
UNDER_PYTEST = "PYTEST_VERSION"


@dataclass(frozen=True, slots=True)
class PluginRow:
    """One plugin.

    Attributes:
        origin: ``installed`` or ``builtin``.
        state: what an engine does with it: ``loads``, ``on request`` (``plugins=[…]``, ``policies=[…]``), or why it never does.
        hooks: without the prefix ``minivllm_``.
        load_ms: its import and construction; None if it was not imported.
    """

    name: str
    distribution: str
    version: str
    origin: str
    state: str
    hooks: tuple[str, ...] = ()
    is_policy: bool = False
    load_ms: float | None = None
    error: str | None = None


def plugins(as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False) -> None:
    """List the plugins that are installed or built in: their hooks, load times and errors."""
    from minivllm_plugin.hookspecs import version_text

    rows = list_plugins()
    environment = _environment()
    if as_json:
        print(json.dumps({"api": version_text(), "environment": environment, "plugins": [asdict(row) for row in rows]}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("plugin", "from", "engines", "policy", "hooks", "load ms", "error"):
        table.add_column(title, justify="right" if title == "load ms" else "left", no_wrap=title == "plugin")
    for row in rows:
        source = f"{row.distribution} {row.version}" if row.distribution else "built in"
        hooks = ", ".join(row.hooks) or "-"
        load = "-" if row.load_ms is None else f"{row.load_ms:.1f}"
        table.add_row(row.name, source, row.state, "yes" if row.is_policy else "-", hooks, load, row.error or "-")
    console = Console()
    console = Console(width=None if console.is_terminal else TABLE_WIDTH_OFF_TERMINAL, highlight=False, markup=False)
    console.print(table)
    for name, value in environment.items():
        console.print(f"{name}: {value}", style="dim")
    console.print(f"hooks API {version_text()}; a policy steers only when it is named: --policy, LLM(policies=[…])", style="dim")


def list_plugins() -> list[PluginRow]:
    """All of them: installed ones by name, then ours. Never fails because of one."""
    from minivllm_plugin.plugins.discovery import BUILTIN, GROUP, load_named

    found = sorted(entry_points(group=GROUP), key=lambda point: point.name)
    names = [point.name for point in found]
    rows = [_installed(point, clashes=names.count(point.name) > 1 or point.name in BUILTIN) for point in found]
    for name in BUILTIN:
        row = PluginRow(name, "", "", "builtin", _state(name, is_builtin=True))
        rows.append(row if row.state.startswith("blocked") else _inspected(row, load_named(name)))
    return rows


def _installed(point: EntryPoint, *, clashes: bool) -> PluginRow:
    from minivllm_plugin.plugins.discovery import load_named

    distribution = point.dist.metadata["Name"] if point.dist else ""
    version = point.dist.version if point.dist else ""
    row = PluginRow(point.name, distribution, version, "installed", _state(point.name, is_builtin=False))
    if clashes:
        return replace(row, error="another plugin has this name, too; block or uninstall one of them")
    return row if row.state not in ("loads", "on request") else _inspected(row, load_named(point.name))


def _state(name: str, *, is_builtin: bool) -> str:
    from minivllm_plugin.plugins.discovery import ALLOW_VARIABLE, BLOCK_VARIABLE

    allowed, blocked = _names(ALLOW_VARIABLE), _names(BLOCK_VARIABLE)
    if name in (blocked or ()):
        return f"blocked ({BLOCK_VARIABLE})"
    if allowed is not None and name not in allowed and not is_builtin:
        return f"not in {ALLOW_VARIABLE}"
    loads = name in allowed if allowed is not None else not is_builtin and UNDER_PYTEST not in os.environ
    return "loads" if loads else "on request"


def _inspected(row: PluginRow, loaded: "LoadedPlugin") -> PluginRow:
    from minivllm_plugin.hookspecs import POLICY_HOOKS

    row = replace(row, load_ms=round(loaded.load_seconds * 1e3, 1))
    if loaded.error is not None:
        return replace(row, error=loaded.error)
    hooks: list[str] = []
    try:
        for hook in _registered(loaded.name, loaded.plugin):
            hooks.append(hook)
    except Exception as error:  # a plugin's own code, and what pluggy says of its signatures
        row = replace(row, error=f"{type(error).__name__}: {error}")
    is_policy = any(hook in POLICY_HOOKS for hook in hooks)
    return replace(row, hooks=tuple(hook.removeprefix("minivllm_") for hook in hooks), is_policy=is_policy)


def _registered(name: str, plugin: Any) -> Iterator[str]:
    """The hooks of one plugin, then whatever is wrong with them as an exception: checked as an engine checks them."""
    from minivllm_plugin.cli.plugin_commands import commands_of
    from minivllm_plugin.extensions import Extensions
    from minivllm_plugin.plugins.collection import REGISTRIES, check_plugin, hook_manager

    manager = hook_manager()
    manager.register(plugin, name)
    callers = sorted(manager.get_hookcallers(plugin) or (), key=lambda caller: caller.name)
    yield from (caller.name for caller in callers)
    check_plugin(manager, plugin)
    extensions = Extensions.builtin()
    for caller in callers:
        for implementation in caller.get_hookimpls():
            if caller.name in REGISTRIES:
                registry = getattr(extensions, REGISTRIES[caller.name])
                with registry.owned_by(name):
                    implementation.function(*[registry] * len(implementation.argnames))
            if caller.name == "minivllm_register_commands":
                commands_of(lambda cli, found=implementation: found.function(*[cli] * len(found.argnames)))


def _environment() -> dict[str, str]:
    """The variables that decide what loads, and what they mean at present."""
    from minivllm_plugin.plugins.discovery import ALLOW_VARIABLE, BLOCK_VARIABLE

    allowed, blocked = _names(ALLOW_VARIABLE), _names(BLOCK_VARIABLE)
    if allowed is None:
        meaning = "unset: every installed plugin loads"
        if UNDER_PYTEST in os.environ:
            meaning = f"unset, and {UNDER_PYTEST} is set: nothing loads by itself"
    else:
        meaning = f"only {', '.join(allowed)}" if allowed else "empty: nothing loads by itself"
    return {ALLOW_VARIABLE: meaning, BLOCK_VARIABLE: f"never {', '.join(blocked)}" if blocked else "unset: none is blocked"}


def _names(variable: str) -> list[str] | None:
    text = os.environ.get(variable)
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
