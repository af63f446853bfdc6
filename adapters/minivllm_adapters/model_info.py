"""What LiteLLM should know of a model that runs here: its window, that it costs nothing, what it can do and what it cannot.

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
    "supports_response_schema": True,  # enforced by the engine, whatever the model
    "supports_vision": False,
    "supports_audio_input": False,
}

CALLING = ("supports_function_calling", "supports_parallel_function_calling", "supports_tool_choice")


def model_info(llm: "LLM") -> dict[str, Any]:
    """The table entry of one model. Its window is prompt plus completion, in tokens."""
    finds_calls = llm.tool_format != "none"
    return {
        **FIXED,
        **dict.fromkeys(("max_tokens", "max_input_tokens", "max_output_tokens"), llm.max_model_len),
        **dict.fromkeys(CALLING, finds_calls),
        "supports_reasoning": not llm.output_parser().is_plain,  # without tools nothing but reasoning is looked for
    }


def announce(name: str, llm: "LLM") -> None:
    """Enter ``minivllm/<name>`` in LiteLLM's table, once; prices that the user has set there are kept."""
    import litellm

    key = f"{PROVIDER}/{name}"
    known: Mapping[str, Any] = litellm.model_cost.get(key) or {}
    info = model_info(llm)
    if all(known.get(field) == value for field, value in info.items() if "cost" not in field):
        return
    prices = {field: value for field, value in known.items() if "cost" in field and value is not None}
    litellm.register_model({key: {**info, **prices}})
