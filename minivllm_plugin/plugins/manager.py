"""The plugins of one engine: collected, checked by pluggy, and turned into call lists for observers and policies.

One per engine; made on the thread that makes the engine, used on the engine thread. pluggy's manager holds the hooks and
checks names and signatures; calling them with isolation is :mod:`minivllm_plugin.plugins.calls`.
"""

import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pluggy

from minivllm_plugin import hookspecs
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.hooks import Observer
from minivllm_plugin.engine.sequence import Sequence as EngineSequence
from minivllm_plugin.engine.steering import Steering, engine_state, request_view
from minivllm_plugin.errors import ConfigError, MinivllmError, PluginError, RequestRejectedError
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
from minivllm_plugin.plugins.facade import ConfigDraft, EngineHandle, HookTotals
from minivllm_plugin.plugins.observation import Observation
from minivllm_plugin.plugins.policies import PolicyChain

if TYPE_CHECKING:
    from minivllm_plugin.engine.scheduler import Scheduler
    from minivllm_plugin.extensions import Extensions

__all__ = ["EnginePlugins", "PluginReport"]

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


class EnginePlugins:
    """Plugins, policies and extensions of one engine.

    Args:
        config: its fields ``plugins``, ``block_plugins``, ``policies``, ``plugin_errors`` and ``plugin_budget``.
        extensions: the registries that ``register_*`` hooks fill.

    Raises:
        PluginError: a plugin or policy that was asked for in ``config`` cannot be had; with ``plugin_errors="raise"`` also an
            installed one.
    """

    def __init__(self, config: EngineConfig, extensions: "Extensions") -> None:
        self.extensions = extensions
        self.reports_of_failed: list[LoadedPlugin] = []
        self._policy = CallPolicy(config.plugin_errors == "raise", config.plugin_budget)
        self._pluggy = pluggy.PluginManager(hookspecs.PROJECT)
        self._pluggy.add_hookspecs(hookspecs)
        self._loaded: dict[str, LoadedPlugin] = {}
        for plugin in discover(config.block_plugins):
            self._add(plugin, is_wanted=False)
        blocked = blocked_names(config.block_plugins)
        for given in (*config.plugins, *config.policies):
            name = given if isinstance(given, str) else name_of(given)
            if name not in blocked and self._is_new(name, given):
                self._add(_given(given), is_wanted=True)
        self._policy_names = [given if isinstance(given, str) else name_of(given) for given in config.policies]
        self._calls = self._resolve()
        self._chain: PolicyChain | None = None
        self._observation: Observation | None = None
        self._scheduler: Scheduler | None = None
        self._clock: Callable[[], float] = lambda: 0.0
        self._check_policies()

    # --- before the engine -----------------------------------------------------------------------------------------

    def configure(self, config: EngineConfig) -> EngineConfig:
        """``config`` as ``minivllm_configure`` leaves it.

        Raises:
            ConfigError: a plugin failed or left an impossible setting; names it.
        """
        for entry in self._calls["minivllm_configure"]:
            draft = ConfigDraft(config)
            try:
                entry.call({"config": draft})
                changed = draft.finished()
            except Exception as error:
                raise ConfigError(f"plugin {entry.title} failed in minivllm_configure: {describe_error(error)}") from error
            for name in ("plugins", "policies", "block_plugins", "plugin_errors", "plugin_budget"):
                if getattr(changed, name) != getattr(config, name):
                    raise ConfigError(
                        f"plugin {entry.title} changes {name} in minivllm_configure, when plugins are chosen already"
                    )
            config = changed
        return config

    # --- the engine's Hooks protocol --------------------------------------------------------------------------------

    @property
    def is_calling(self) -> bool:
        return self._policy.is_calling

    def attach(self, scheduler: "Scheduler", clock: Callable[[], float]) -> Observer | None:
        """Steer ``scheduler`` by the named policies; return who is to be told, or None when nobody listens."""
        self._scheduler, self._clock = scheduler, clock
        decisions = {hook.removeprefix("minivllm_"): self._calls[hook] for hook in POLICY_HOOKS if self._calls[hook]}
        if decisions:
            self._chain = PolicyChain(decisions)
            scheduler.steer(Steering(self._chain, clock))
        observed = {hook: self._calls[hook] for hook in OBSERVER_HOOKS if self._calls[hook]}
        if observed or decisions:  # policies are judged by the time of a step, which the observation takes
            self._observation = Observation(observed, self._policy, scheduler, clock)
        return self._observation

    def before_queueing(self, seq: EngineSequence) -> None:
        """Ask ``admit`` and ``cache_salt``."""
        chain = self._chain
        if chain is None or self._scheduler is None or not (chain.answers("admit") or chain.answers("cache_salt")):
            return
        view = request_view(seq, 0)
        try:
            chain.may_queue(view, engine_state(self._scheduler, self._clock()))
        except RequestRejectedError as error:
            if self._observation is not None:
                self._observation.request_rejected(seq, error)
            raise
        seq.cache_salt = chain.salt(seq, view)

    # --- life of the engine ------------------------------------------------------------------------------------------

    def started(self, handle: EngineHandle) -> None:
        """Tell everybody that the engine serves."""
        self._tell("minivllm_engine_started", engine=handle)

    def failed(self, error: BaseException) -> None:
        """Tell observers that the engine dies. Never raises."""
        if self._observation is not None:
            try:
                self._observation.engine_error(error)
            except PluginError:
                logger.exception("a plugin failed in minivllm_engine_error")

    def stopped(self, handle: EngineHandle, error: BaseException | None) -> None:
        """Tell everybody that it is over, whatever any of them raises; slow observers once they have heard all the rest."""
        if self._observation is not None:
            self._observation.close()
        self._tell("minivllm_engine_stopped", engine=handle, error=error)

    def reports(self) -> list[PluginReport]:
        """What there is, what it did and what went wrong; also those that failed to load."""
        return [self._report(loaded) for loaded in (*self._loaded.values(), *self.reports_of_failed)]

    def totals(self) -> list[HookTotals]:
        """The hooks that were called so far. Any thread: numbers of a call that is under way may be missing."""
        called = [entry for entries in self._calls.values() for entry in entries if entry.statistics.num_calls]
        return [
            HookTotals(
                entry.plugin,
                entry.hook.removeprefix("minivllm_"),
                entry.statistics.num_calls,
                entry.statistics.num_errors,
                entry.statistics.total_seconds,
            )
            for entry in called
        ]

    # --- helpers -------------------------------------------------------------------------------------------------------

    def _add(self, loaded: LoadedPlugin, *, is_wanted: bool) -> None:
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
        if is_wanted or self._policy.raise_errors:
            raise PluginError(message)
        logger.warning("%s", message)
        self.reports_of_failed.append(replace(loaded, error=error))

    def _register(self, loaded: LoadedPlugin) -> None:
        manager, plugin = self._pluggy, loaded.plugin
        manager.register(plugin, loaded.name)
        try:
            manager.check_pending()
            self._check_functions(plugin)
            if not manager.get_hookcallers(plugin):
                raise PluginError("it implements no hook; mark its functions with minivllm_plugin.hookspecs.hookimpl")
            for entry in self._entries(loaded, REGISTRIES):
                registry = getattr(self.extensions, REGISTRIES[entry.hook])
                with registry.owned_by(loaded.name):
                    entry.call({"registry": registry})
        except Exception as error:
            manager.unregister(plugin)
            self.extensions.discard_owner(loaded.name)
            if isinstance(error, (pluggy.PluginValidationError, MinivllmError)):
                raise
            raise PluginError(describe_error(error)) from error

    def _check_functions(self, plugin: object) -> None:
        """Refuse what would be called and yet do nothing, and what could hide others' errors and answers."""
        for caller in self._pluggy.get_hookcallers(plugin) or ():
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

    def _resolve(self) -> dict[str, list[HookCall]]:
        """Call lists: observers in the order of registration, policies only if named, in the order of their naming."""
        observers = {
            hook: [entry for loaded in self._loaded.values() for entry in self._entries(loaded, [hook])]
            for hook in (*OBSERVER_HOOKS, *LIFECYCLE_HOOKS)
        }
        named = [self._loaded[name] for name in dict.fromkeys(self._policy_names) if name in self._loaded]
        policies = {hook: [entry for loaded in named for entry in self._entries(loaded, [hook])] for hook in POLICY_HOOKS}
        return {**observers, **policies}

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
                            self._policy,
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
        for name in self._policy_names:
            if name not in self._loaded:
                raise PluginError(
                    f"policy {name!r} is blocked by block_plugins or {BLOCK_VARIABLE}; leave it out of one of the two"
                )
            if not any(entry.plugin == name for hook in POLICY_HOOKS for entry in self._calls[hook]):
                raise PluginError(
                    f"{name!r} is no policy: it implements none of {', '.join(POLICY_HOOKS)}; pass it as a plugin instead"
                )

    def _tell(self, hook: str, **arguments: Any) -> None:
        raised: PluginError | None = None
        for entry in self._calls[hook]:
            try:
                entry.call(arguments)
            except Exception as error:
                try:
                    entry.failed(error)
                except PluginError as failure:
                    raised = raised or failure
        if raised is not None:
            raise raised

    def _report(self, loaded: LoadedPlugin) -> PluginReport:
        calls = [entry for entries in self._calls.values() for entry in entries if entry.plugin == loaded.name]
        callers: Sequence[Any] = (self._pluggy.get_hookcallers(loaded.plugin) or ()) if loaded.error is None else ()
        hooks = tuple(sorted(caller.name.removeprefix("minivllm_") for caller in callers))
        errors = [] if loaded.error is None else [loaded.error]
        for entry in calls:
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
            loaded.name in self._policy_names,
            hooks,
            loaded.load_seconds,
            sum(entry.statistics.num_calls for entry in calls),
            sum(entry.statistics.total_seconds for entry in calls),
            tuple(errors),
        )


def _given(given: object) -> LoadedPlugin:
    if isinstance(given, str):
        return load_named(given)
    return LoadedPlugin(name_of(given), given, error=why_incompatible(given))
