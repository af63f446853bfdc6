"""What plugins did, as people and exporters read it. Made from the counts of their calls; keeps nothing, any thread."""

from collections.abc import Iterable
from dataclasses import dataclass

from minivllm_plugin.plugins.calls import HookCall
from minivllm_plugin.plugins.discovery import LoadedPlugin
from minivllm_plugin.plugins.facade import HookTotals

__all__ = ["PluginReport", "report_of", "totals_of"]


@dataclass(frozen=True, slots=True)
class PluginReport:
    """One plugin as people want to see it. ``hooks`` without the prefix; ``errors`` in words."""

    name: str
    distribution: str
    version: str
    origin: str
    is_policy: bool
    hooks: tuple[str, ...]
    load_seconds: float
    num_calls: int
    total_seconds: float
    errors: tuple[str, ...]


def report_of(loaded: LoadedPlugin, hooks: Iterable[str], calls: Iterable[HookCall], *, is_policy: bool) -> PluginReport:
    """``loaded`` with the hooks that it implements and, of ``calls``, its own."""
    own = [entry for entry in calls if entry.plugin == loaded.name]
    errors = [] if loaded.error is None else [loaded.error]
    for entry in own:
        hook = entry.hook.removeprefix("minivllm_")
        if entry.disabled_because is not None:
            errors.append(f"{hook}: {entry.disabled_because}")
        elif entry.statistics.num_errors:
            errors.append(f"{hook}: {entry.statistics.num_errors} errors")
    return PluginReport(
        loaded.name,
        loaded.distribution,
        loaded.version,
        loaded.origin,
        is_policy,
        tuple(sorted(hook.removeprefix("minivllm_") for hook in hooks)),
        loaded.load_seconds,
        sum(entry.statistics.num_calls for entry in own),
        sum(entry.statistics.total_seconds for entry in own),
        tuple(errors),
    )


def totals_of(calls: Iterable[HookCall]) -> list[HookTotals]:
    """Those that were called so far. Numbers of a call that is under way may be missing."""
    return [
        HookTotals(
            entry.plugin,
            entry.hook.removeprefix("minivllm_"),
            entry.statistics.num_calls,
            entry.statistics.num_errors,
            entry.statistics.total_seconds,
        )
        for entry in calls
        if entry.statistics.num_calls
    ]
