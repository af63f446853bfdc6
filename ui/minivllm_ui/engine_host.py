"""The engine behind the page: which model, with which pool and policy, and starting it anew with others. Any thread.

Owns the options; the registry owns the engine, so that LiteLLM, and everything else in this process, sees the same one.
"""

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import minivllm_plugin
from minivllm_plugin import registry
from minivllm_plugin.errors import ConfigError, MinivllmError, PluginError
from minivllm_plugin.hookspecs import POLICY_HOOKS
from minivllm_plugin.plugins.discovery import BUILTIN, discover, load_named
from minivllm_ui.observer import EngineObserver

__all__ = ["FCFS", "EngineHost", "policy_names"]

FCFS = "fcfs"
TRIES = 5  # somebody else in this process may start the engine between our close and our configure


class EngineHost:
    """One model, one engine at a time.

    Args:
        model: as in ``LLM(model)``.
        options: of :class:`minivllm_plugin.EngineConfig`, without ``plugins`` and ``policies``.
        policy: ``fcfs`` or a policy plugin's name.
        observer: given to every engine that is started.

    Attributes:
        policies: names to choose from.

    Raises:
        ConfigError: there is no such policy.
        MinivllmError: the model cannot be loaded.
    """

    def __init__(self, model: str, options: Mapping[str, Any], policy: str, observer: EngineObserver) -> None:
        self.model = model
        self.policy = policy
        self.policies = policy_names(policy)
        self.check_policy(policy)
        self._options = dict(options)
        self._observer = observer
        self._restart = threading.Lock()
        self.is_restarting = False
        minivllm_plugin.register()
        self._start(self._options, policy)
        llm = registry.get_llm(model)
        self.num_blocks = llm.num_blocks
        self.normal_num_blocks = llm.num_blocks
        self.max_model_len = llm.max_model_len
        self.defaults = llm.default_sampling_params()

    def check_policy(self, policy: str) -> None:
        """Raise ConfigError unless it can be chosen."""
        if policy not in self.policies:
            raise ConfigError(f"no policy is called {policy!r}; known are {', '.join(self.policies)}")

    @property
    def litellm_model(self) -> str:
        """What LiteLLM calls it."""
        return f"minivllm/{self.model}"

    def count_tokens(self, messages: list[dict[str, Any]]) -> int:
        """Tokens of a conversation. Starts the engine if it has died."""
        return registry.get_llm(self.model).count_tokens(messages)

    def abort(self, request_id: str) -> None:
        """End a request before the next step; ignored when there is no engine."""
        if (handle := self._observer.handle) is not None:
            handle.abort(request_id)

    def restart(self, num_blocks: int, policy: str) -> None:
        """A new engine with another pool or policy; whoever is being answered gets an error. Seconds.

        Raises:
            MinivllmError: it cannot be had; the former engine's settings are then started again.
        """
        with self._restart:
            self.is_restarting = True
            try:
                try:
                    self._start({**self._options, "num_blocks": num_blocks}, policy)
                except MinivllmError:
                    self._start({**self._options, "num_blocks": self.num_blocks}, self.policy)
                    raise
                llm = registry.get_llm(self.model)
                self.num_blocks, self.policy, self.max_model_len = llm.num_blocks, policy, llm.max_model_len
            finally:
                self.is_restarting = False

    def revive(self) -> None:
        """Start the engine again if it is dead; else nothing."""
        registry.get_llm(self.model)

    def close(self) -> None:
        registry.close(self.model)

    def _start(self, options: Mapping[str, Any], policy: str) -> None:
        policies = () if policy == FCFS else (policy,)
        for attempt in range(TRIES):
            registry.close(self.model)
            try:
                registry.configure(self.model, **options, plugins=[self._observer], policies=policies)
                break
            except ConfigError as error:
                if attempt == TRIES - 1 or "is loaded with other options" not in str(error):
                    raise
        registry.get_llm(self.model)


def policy_names(named: str = FCFS) -> list[str]:
    """``fcfs``, our policy plugins and the installed ones, if they load; ``named`` even if nothing loads it by itself."""
    plugins = [*map(load_named, BUILTIN), *discover()]
    with contextlib.suppress(PluginError):
        plugins.append(load_named(named))
    is_policy = (one.error is None and any(hasattr(one.plugin, hook) for hook in POLICY_HOOKS) for one in plugins)
    return list(dict.fromkeys([FCFS, *(one.name for one, fits in zip(plugins, is_policy, strict=True) if fits)]))
