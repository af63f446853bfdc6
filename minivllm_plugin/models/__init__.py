"""Models: where they come from (catalog, pull), how their files are read (loader, gguf) and what they compute.

This module owns only the table of architectures. It imports nothing heavy, so listing models costs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from minivllm_plugin.errors import UnsupportedModelError

if TYPE_CHECKING:
    from minivllm_plugin.models.decoder import CausalLM

__all__ = ["ARCHITECTURES", "architecture_class"]

# Name in config.json's "architectures" -> "module:class". The module is imported when such a model is loaded.
ARCHITECTURES: dict[str, str] = {
    "LlamaForCausalLM": "minivllm_plugin.models.llama:LlamaForCausalLM",
    "Qwen2ForCausalLM": "minivllm_plugin.models.qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "minivllm_plugin.models.qwen3:Qwen3ForCausalLM",
}


def architecture_class(name: str) -> "type[CausalLM]":
    """The class that computes architecture ``name``.

    Raises:
        UnsupportedModelError: no such architecture here; the message lists those that are.
    """
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(f"architecture {name!r} is not supported; supported are {', '.join(sorted(ARCHITECTURES))}")
    module, _, attribute = ARCHITECTURES[name].partition(":")
    loaded: type[CausalLM] = getattr(import_module(module), attribute)
    return loaded
