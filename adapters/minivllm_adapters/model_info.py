"""What LiteLLM should know of a model that runs here: its window, that it costs nothing, and what it cannot do.

Without an entry in LiteLLM's model table ``get_model_info`` raises, costs are unknown and context-window checks are off. The
table is LiteLLM's own process-wide dict; callers of this function run on request threads, never on the engine's.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minivllm_adapters.errors import PROVIDER

if TYPE_CHECKING:
    from minivllm_plugin.serving.llm import LLM

__all__ = ["announce", "model_info"]

FIXED: Mapping[str, object] = {
    "litellm_provider": PROVIDER,
    "mode": "chat",
    # Zero, and not absent: LiteLLM warns about a model whose cache prices are missing.
    "input_cost_per_token": 0.0,
    "output_cost_per_token": 0.0,
    "cache_read_input_token_cost": 0.0,
    "cache_creation_input_token_cost": 0.0,
    "supports_system_messages": True,
    "supports_prompt_caching": True,
    "supports_function_calling": False,
    "supports_parallel_function_calling": False,
    "supports_tool_choice": False,
    "supports_response_schema": False,
    "supports_reasoning": False,
    "supports_vision": False,
    "supports_audio_input": False,
}


def model_info(max_model_len: int) -> dict[str, Any]:
    """The table entry of one model; ``max_model_len`` is prompt plus completion, in tokens."""
    window = {"max_tokens": max_model_len, "max_input_tokens": max_model_len, "max_output_tokens": max_model_len}
    return {**FIXED, **window}


def announce(name: str, llm: "LLM") -> None:
    """Enter ``minivllm/<name>`` in LiteLLM's table, once; prices that the user has set there are kept."""
    import litellm

    key = f"{PROVIDER}/{name}"
    known: Mapping[str, Any] = litellm.model_cost.get(key) or {}
    if known.get("max_input_tokens") == llm.max_model_len and known.get("litellm_provider") == PROVIDER:
        return
    prices = {field: value for field, value in known.items() if "cost" in field and value is not None}
    litellm.register_model({key: {**model_info(llm.max_model_len), **prices}})
