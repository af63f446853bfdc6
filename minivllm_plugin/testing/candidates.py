"""A plugin under test: found by name or path, made anew for every check, and the company that it must stand.

Part of the conformance kit (:mod:`minivllm_plugin.testing.conformance`). Loads no model and no torch.
"""

import importlib
import inspect
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from minivllm_plugin import hookspecs
from minivllm_plugin.errors import PluginError
from minivllm_plugin.hookspecs import OBSERVER_HOOKS, POLICY_HOOKS, hookimpl
from minivllm_plugin.plugins.discovery import BUILTIN, GROUP

__all__ = ["Candidate", "neighbours"]

IMPORT_SECONDS = 60
MEASURE = """
import importlib, sys, time
import minivllm_plugin.plugins
began = time.perf_counter()
importlib.import_module(sys.argv[1])
print(time.perf_counter() - began)
"""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One plugin.

    Attributes:
        name: as it was asked for.
        target: ``package.module:attribute``, or a module alone.
    """

    name: str
    target: str

    @classmethod
    def find(cls, name: str) -> "Candidate":
        """The plugin of this name: one of ours, an installed one, or ``package.module`` / ``package.module:attribute``.

        Raises:
            PluginError: it is neither.
        """
        installed = {point.name: point.value for point in entry_points(group=GROUP)}
        known = {**installed, **BUILTIN}
        if name in known:
            return cls(name, known[name])
        if ":" in name or "." in name or name.isidentifier():
            return cls(name, name)
        raise PluginError(f"{name!r} is no plugin's name ({', '.join(sorted(known))}) and no path like 'package.module:Class'")

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    def make(self) -> Any:
        """The plugin: a new object if it is a class, else the one that there is."""
        module, _, attribute = self.target.partition(":")
        found: Any = importlib.import_module(module)
        for part in attribute.split(".") if attribute else ():
            found = getattr(found, part)
        return found() if isinstance(found, type) else found

    def hooks(self) -> set[str]:
        """The hooks that it implements. Properties are not evaluated: they may well raise before an engine runs."""
        plugin = self.make()
        static = {name: inspect.getattr_static(plugin, name, None) for name in dir(plugin)}
        marked = {name: getattr(getattr(found, "__func__", found), "minivllm_impl", None) for name, found in static.items()}
        return {options.get("specname") or name for name, options in marked.items() if options}

    def is_policy(self) -> bool:
        return bool(self.hooks() & set(POLICY_HOOKS))

    def import_seconds(self) -> float:
        """What its import takes in a fresh interpreter that has loaded our plugin room.

        Raises:
            PluginError: it cannot be imported there.
        """
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-c", MEASURE, self.module]
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=IMPORT_SECONDS, check=False)
        if done.returncode:
            raise PluginError(f"plugin {self.name!r} cannot be imported by itself:\n{done.stderr}")
        return float(done.stdout.splitlines()[-1])


def neighbours() -> tuple[list[ModuleType], list[ModuleType]]:
    """Bad company: plugins and policies that raise, dawdle and answer nonsense at every hook. New ones at each call."""
    raising = _neighbour("raising-neighbour", (*OBSERVER_HOOKS, *POLICY_HOOKS), _raise)
    slow = _neighbour("slow-neighbour", ["minivllm_step_started", "minivllm_step_finished"], _dawdle)
    nonsense = _neighbour(
        "nonsense-neighbour", [hook for hook in POLICY_HOOKS if hook != "minivllm_cache_salt"], _answer_nonsense
    )
    return [raising, slow], [raising, nonsense]


def _neighbour(name: str, hooks: Any, behave: Any) -> ModuleType:
    module = ModuleType(name)
    for hook in hooks:
        assert hasattr(hookspecs, hook)

        def implementation() -> Any:
            return behave()

        setattr(module, hook, hookimpl(specname=hook)(implementation))
    return module


def _raise() -> Any:
    raise RuntimeError("a neighbour that raises on purpose")


def _dawdle() -> Any:
    time.sleep(0.002)


def _answer_nonsense() -> Any:
    return [None, "nobody", -1]
