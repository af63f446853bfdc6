"""Which plugins one engine has: collected, registered, checked, and turned into call lists. The pluggy side.

pluggy's manager holds the hooks and checks names and signatures; calling them with isolation is
:mod:`minivllm_plugin.plugins.calls`. Used on the thread that makes the engine; knows neither scheduler nor step.
"""

import inspect
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import pluggy

from minivllm_plugin import hookspecs
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import MinivllmError, PluginError
from minivllm_plugin.hookspecs import LIFECYCLE_HOOKS, OBSERVER_HOOKS, POLICY_HOOKS
from minivllm_plugin.plugins.calls import CallPolicy, HookCall, describe_error
from minivllm_plugin.plugins.discovery import (
    BLOCK_VARIABLE,
    LoadedPlugin,
    blocked_names,
    discover,
    load_named,
    name_of,
    why_incompatible,
)

if TYPE_CHECKING:
    from minivllm_plugin.extensions import Extensions

__all__ = ["REGISTRIES", "PluginCollection", "check_plugin", "hook_manager"]

logger = logging.getLogger(__name__)

MAX_OBSERVER_ERRORS_IN_A_ROW = 5
MAX_POLICY_ERRORS = 3

# Hook -> the registry of Extensions that it fills. minivllm_register_commands belongs to the command line, not to an engine.
REGISTRIES = {
    "minivllm_register_models": "models",
    "minivllm_register_attention_backends": "attention",
    "minivllm_register_weight_loaders": "weights",
    "minivllm_register_logits_processors": "logits",
    "minivllm_register_stop_criteria": "stopping",
    "minivllm_register_parsers": "parsers",
    "minivllm_register_metrics": "metrics",
    "minivllm_register_adapters": "adapters",
}


class PluginCollection:
    """The installed plugins that are allowed, and those that ``config`` names or holds.

    Args:
        config: its fields ``plugins``, ``block_plugins`` and ``policies``.
        extensions: the registries that ``register_*`` hooks fill.
        call_policy: shared by all calls of the engine.

    Attributes:
        policy_names: in the order in which they are asked.

    Raises:
        PluginError: a plugin or policy that was asked for in ``config`` cannot be had; if errors are to be raised, also an
            installed one.
    """

    def __init__(self, config: EngineConfig, extensions: "Extensions", call_policy: CallPolicy) -> None:
        self.policy_names = [given if isinstance(given, str) else name_of(given) for given in config.policies]
        self._extensions = extensions
        self._call_policy = call_policy
        self._pluggy = hook_manager()
        self._loaded: dict[str, LoadedPlugin] = {}
        self._failed: list[LoadedPlugin] = []
        for plugin in discover(config.block_plugins):
            self.add(plugin, is_wanted=False)
        blocked = blocked_names(config.block_plugins)
        for given in (*config.plugins, *config.policies):
            name = given if isinstance(given, str) else name_of(given)
            if name not in blocked and self._is_new(name, given):
                self.add(_given(given), is_wanted=True)
        self._check_policies()

    def add(self, loaded: LoadedPlugin, *, is_wanted: bool) -> None:
        """Register a plugin, or note why it cannot be used; raises PluginError for that if it ``is_wanted``."""
        error = loaded.error
        if error is None:
            try:
                self._register(loaded)
            except (pluggy.PluginValidationError, ValueError, MinivllmError, TypeError) as failure:
                error = " ".join(str(failure).split())
        if error is None:
            self._loaded[loaded.name] = loaded
            return
        message = f"plugin {loaded.title} cannot be used: {error}"
        if is_wanted or self._call_policy.raise_errors:
            raise PluginError(message)
        logger.warning("%s", message)
        self._failed.append(replace(loaded, error=error))

    def plugins(self) -> list[LoadedPlugin]:
        """All there are; those that cannot be used come last, each with its error."""
        return [*self._loaded.values(), *self._failed]

    def hooks_of(self, loaded: LoadedPlugin) -> list[str]:
        """The hooks that it implements."""
        callers = self._pluggy.get_hookcallers(loaded.plugin) if loaded.error is None else None
        return [caller.name for caller in callers or ()]

    def call_lists(self) -> dict[str, list[HookCall]]:
        """Hook -> whom to call: observers in the order of registration, policies only if named, in the order of their naming."""
        observers = {
            hook: [entry for loaded in self._loaded.values() for entry in self._entries(loaded, [hook])]
            for hook in (*OBSERVER_HOOKS, *LIFECYCLE_HOOKS)
        }
        named = [self._loaded[name] for name in dict.fromkeys(self.policy_names)]
        policies = {hook: [entry for loaded in named for entry in self._entries(loaded, [hook])] for hook in POLICY_HOOKS}
        return {**observers, **policies}

    # --- helpers -------------------------------------------------------------------------------------------------------

    def _register(self, loaded: LoadedPlugin) -> None:
        manager, plugin = self._pluggy, loaded.plugin
        manager.register(plugin, loaded.name)
        try:
            check_plugin(manager, plugin)
            for entry in self._entries(loaded, REGISTRIES):
                registry = getattr(self._extensions, REGISTRIES[entry.hook])
                with registry.owned_by(loaded.name):
                    entry.call({"registry": registry})
        except Exception as error:
            manager.unregister(plugin)
            self._extensions.discard_owner(loaded.name)
            if isinstance(error, (pluggy.PluginValidationError, MinivllmError)):
                raise
            raise PluginError(describe_error(error)) from error

    def _entries(self, loaded: LoadedPlugin, hooks: Iterable[str]) -> list[HookCall]:
        entries = []
        for hook in hooks:
            caller = getattr(self._pluggy.hook, hook)
            for implementation in caller.get_hookimpls():
                if implementation.plugin is loaded.plugin:
                    known = caller.spec.argnames if caller.spec is not None else ()
                    entries.append(
                        HookCall(
                            loaded.name,
                            hook,
                            implementation.function,
                            tuple(implementation.argnames),
                            self._call_policy,
                            most_in_a_row=MAX_OBSERVER_ERRORS_IN_A_ROW if hook in OBSERVER_HOOKS else None,
                            most_in_all=MAX_POLICY_ERRORS if hook in POLICY_HOOKS and hook != "minivllm_cache_salt" else None,
                            optional_names=tuple(name for name in implementation.kwargnames if name in known),
                            title=loaded.title,
                            owner=loaded.plugin,
                        )
                    )
        return entries

    def _is_new(self, name: str, given: object) -> bool:
        known = self._loaded.get(name)
        if known is None:
            return True
        if isinstance(given, str) or known.plugin is given:
            return False
        raise PluginError(f"two plugins are called {name!r}; give one another minivllm_name, or leave one out")

    def _check_policies(self) -> None:
        for name in self.policy_names:
            if name not in self._loaded:
                raise PluginError(
                    f"policy {name!r} is blocked by block_plugins or {BLOCK_VARIABLE}; leave it out of one of the two"
                )
            if not set(self.hooks_of(self._loaded[name])) & set(POLICY_HOOKS):
                raise PluginError(
                    f"{name!r} is no policy: it implements none of {', '.join(POLICY_HOOKS)}; pass it as a plugin instead"
                )


def hook_manager() -> pluggy.PluginManager:
    """pluggy's manager with our hooks, and no plugin yet."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def check_plugin(manager: pluggy.PluginManager, plugin: object) -> None:
    """Refuse a registered plugin that has unknown hooks, or none, and one that would be called and yet do nothing, or could
    hide others' errors and answers.

    Raises:
        PluginError, pluggy.PluginValidationError: says what is wrong.
    """
    manager.check_pending()
    callers = manager.get_hookcallers(plugin) or []
    for caller in callers:
        for implementation in caller.get_hookimpls():
            if implementation.plugin is not plugin or not caller.has_spec():
                continue
            function = implementation.function
            if implementation.wrapper or implementation.hookwrapper:
                raise PluginError(f"{caller.name} must not be a wrapper: one plugin could hide another's errors and answers")
            if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
                raise PluginError(f"{caller.name} must not be async: nobody would await it; hand the work to a thread")
            if inspect.isgeneratorfunction(function) and caller.name not in POLICY_HOOKS:
                raise PluginError(f"{caller.name} must not be a generator: nobody would run it")
    if not callers:
        raise PluginError("it implements no hook; mark its functions with minivllm_plugin.hookspecs.hookimpl")


def _given(given: object) -> LoadedPlugin:
    if isinstance(given, str):
        return load_named(given)
    return LoadedPlugin(name_of(given), given, error=why_incompatible(given))
