"""Registering ``minivllm/…`` with LiteLLM. Importing this module loads neither LiteLLM nor torch; :func:`register` loads LiteLLM.

``provider`` is the handler object, made on first access: the path ``minivllm_adapters.litellm_provider.provider``, or shorter
``minivllm_adapters.provider``, is what a LiteLLM proxy's ``custom_provider_map`` names. The class lives in another module that
is always imported by its real name, so that LiteLLM's loader, which executes a file beside its configuration a second time
under no name, still ends at the one instance.
"""

import importlib
import importlib.metadata
import re
from typing import TYPE_CHECKING

from minivllm_adapters.errors import PROVIDER, LiteLLMUnavailableError

if TYPE_CHECKING:
    from minivllm_adapters.handler import MinivllmProvider

    provider: MinivllmProvider

__all__ = ["PROVIDER", "provider", "register"]

# Before 1.109 a usage chunk has an empty choice, before 1.108 streams have no close(), and 1.100 loses a stream's first text.
OLDEST_LITELLM = (1, 109)
INSTALL = "pip install 'minivllm-plugin[litellm]'"


def register() -> "MinivllmProvider":
    """Make ``litellm.completion(model="minivllm/…")`` work, and return the handler.

    May be called any number of times, from any thread. LiteLLM keeps providers in a plain list that other code re-assigns
    (LiteLLM's own documentation does, and its proxy), so this looks into the list each time rather than remembering. A
    subclass of our handler that somebody put there stays; any other object under our name is replaced.

    Raises:
        LiteLLMUnavailableError: LiteLLM is missing, broken or too old; says what to install.
    """
    _check_litellm()
    import litellm
    from litellm.utils import custom_llm_setup

    from minivllm_adapters import handler

    providers = litellm.custom_provider_map
    ours = next((entry["custom_handler"] for entry in providers if entry["provider"] == PROVIDER), None)
    if not isinstance(ours, handler.MinivllmProvider):
        ours = handler.provider
        providers[:] = [entry for entry in providers if entry["provider"] != PROVIDER]
        providers.append({"provider": PROVIDER, "custom_handler": ours})
    # LiteLLM does this at each call too; done now, its parameter look-ups work before the first one.
    custom_llm_setup()  # type: ignore[no-untyped-call]  # LiteLLM's own, without annotations
    return ours


def _check_litellm() -> None:
    try:
        version = importlib.metadata.version("litellm")
    except importlib.metadata.PackageNotFoundError:
        version = ""
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if version and found < OLDEST_LITELLM:
        oldest = ".".join(map(str, OLDEST_LITELLM))
        raise LiteLLMUnavailableError(f"litellm {version} is too old, {oldest} or newer is needed: {INSTALL}", name="litellm")
    try:
        importlib.import_module("litellm")
    except ImportError as error:
        what = f"litellm {version} cannot be imported ({error})" if version else "litellm is not installed"
        raise LiteLLMUnavailableError(f"{what}; to use minivllm models through LiteLLM: {INSTALL}", name="litellm") from error


def __getattr__(name: str) -> object:
    if name == "provider":
        return importlib.import_module("minivllm_adapters.handler").provider
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
