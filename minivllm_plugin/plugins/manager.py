"""The plugins of one engine while it lives: asked for its settings, attached to it, told of its start, death and end.

One per engine; made on the thread that makes the engine, used on the engine thread. Which plugins there are is
:mod:`minivllm_plugin.plugins.collection`; what they did, :mod:`minivllm_plugin.plugins.reports`.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.hooks import Observer
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.engine.steering import Steering, engine_state, request_view
from minivllm_plugin.errors import ConfigError, PluginError, RequestRejectedError
from minivllm_plugin.hookspecs import OBSERVER_HOOKS, POLICY_HOOKS
from minivllm_plugin.plugins.calls import CallPolicy, HookCall, describe_error
from minivllm_plugin.plugins.collection import PluginCollection
from minivllm_plugin.plugins.facade import ConfigDraft, EngineHandle, HookTotals
from minivllm_plugin.plugins.observation import Observation
from minivllm_plugin.plugins.policies import PolicyChain
from minivllm_plugin.plugins.reports import PluginReport, report_of, totals_of

if TYPE_CHECKING:
    from minivllm_plugin.engine.scheduler import Scheduler
    from minivllm_plugin.extensions import Extensions

__all__ = ["EnginePlugins"]

logger = logging.getLogger(__name__)


class EnginePlugins:
    """Plugins, policies and extensions of one engine.

    Args:
        config: its fields ``plugins``, ``block_plugins``, ``policies``, ``plugin_errors`` and ``plugin_budget``.
        extensions: the registries that ``register_*`` hooks fill.
        judges_speed: False calls nobody slow: for clocks that are not real, and for measuring. So does ``plugin_errors="raise"``:
            that is for tests, and how they end must not depend on the machine.

    Raises:
        PluginError: a plugin or policy that was asked for in ``config`` cannot be had; with ``plugin_errors="raise"`` also an
            installed one.
    """

    def __init__(self, config: EngineConfig, extensions: "Extensions", *, judges_speed: bool = True) -> None:
        self.extensions = extensions
        raises = config.plugin_errors == "raise"
        self._policy = CallPolicy(raises, config.plugin_budget, judges_speed and not raises)
        self._collection = PluginCollection(config, extensions, self._policy)
        self._calls = self._collection.call_lists()
        self._chain: PolicyChain | None = None
        self._observation: Observation | None = None
        self._scheduler: Scheduler | None = None
        self._clock: Callable[[], float] = lambda: 0.0

    # --- what there is -------------------------------------------------------------------------------------------------

    @property
    def has_observers(self) -> bool:
        """Whether anybody wants to be told of requests, steps or blocks."""
        return any(self._calls[hook] for hook in OBSERVER_HOOKS)

    @property
    def decisions(self) -> frozenset[str]:
        """What policies are asked about, such as ``order_waiting``."""
        return frozenset(hook.removeprefix("minivllm_") for hook in POLICY_HOOKS if self._calls[hook])

    def reports(self) -> list[PluginReport]:
        """What there is, what it did and what went wrong; also those that failed to load."""
        collection, calls = self._collection, self._all_calls()
        return [
            report_of(loaded, collection.hooks_of(loaded), calls, is_policy=loaded.name in collection.policy_names)
            for loaded in collection.plugins()
        ]

    def totals(self) -> list[HookTotals]:
        """The hooks that were called so far. Any thread: numbers of a call that is under way may be missing."""
        return totals_of(self._all_calls())

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

    def before_queueing(self, seq: Sequence) -> None:
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

    # --- helpers -------------------------------------------------------------------------------------------------------

    def _all_calls(self) -> list[HookCall]:
        return [entry for entries in self._calls.values() for entry in entries]

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
