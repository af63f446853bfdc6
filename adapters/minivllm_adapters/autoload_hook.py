"""What the autoload file runs when Python starts: wait for somebody to import LiteLLM, then register with it.

Runs in every start of the interpreter, so: only the standard library, no work but one list insert, and no exception ever
leaves. A failure is silent unless MINIVLLM_AUTOLOAD=debug; MINIVLLM_AUTOLOAD=0 switches the hook off for one process.
"""

import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["install", "installed", "uninstall"]

SWITCH = "MINIVLLM_AUTOLOAD"


def install() -> None:
    """Put the hook in front of the import system, once. Does nothing when switched off or when LiteLLM is imported already."""
    if os.environ.get(SWITCH) != "0" and "litellm" not in sys.modules and not installed():
        sys.meta_path.insert(0, _LiteLLMFinder())


def installed() -> bool:
    """Whether this process waits for LiteLLM."""
    return any(isinstance(finder, _LiteLLMFinder) for finder in sys.meta_path)


def uninstall() -> None:
    """Take the hook out of this process."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, _LiteLLMFinder)]


class _LiteLLMFinder(MetaPathFinder):
    """Finds nothing itself: lets the others find ``litellm`` and has a word with its loader."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname != "litellm":
            return None
        try:
            spec = self._from_the_others(fullname, path, target)
            if spec is not None and spec.loader is not None:
                spec.loader = _RegisteringLoader(spec.loader)
            return spec
        except Exception:
            _report()
            return None  # the import goes on as if we were not there

    def _from_the_others(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        for finder in sys.meta_path:
            if finder is not self and (spec := finder.find_spec(fullname, path, target)) is not None:
                return spec
        return None


class _RegisteringLoader(Loader):
    """LiteLLM's own loader, plus our registration once the module is complete. Leaves no trace on the module."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # importlib.resources and inspect ask a module's loader for data and source: they shall meet the real one.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        uninstall()
        try:
            from minivllm_adapters.litellm_provider import register

            register()
        except Exception:
            _report()


def _report() -> None:
    if os.environ.get(SWITCH) == "debug":
        import traceback

        traceback.print_exc()
