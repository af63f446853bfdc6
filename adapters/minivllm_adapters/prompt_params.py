"""What the model is to continue: a conversation and how its template is rendered, or raw prompts. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm_adapters.value_checks import flag, integer, mapping, shortened
from minivllm_plugin.errors import InvalidRequestError

__all__ = ["CHAT_TEMPLATE", "REASONING", "chat_messages", "raw_prompts", "template_options", "thinking_budget"]

# How the messages become a prompt.
CHAT_TEMPLATE = frozenset({"add_generation_prompt", "continue_final_message", "chat_template_kwargs"})

# Whether the model reasons before it answers, for templates that have the switch.
REASONING = frozenset({"reasoning_effort", "thinking"})

EFFORTS = ("none", "disable", "minimal", "low", "medium", "high", "xhigh", "max")
NO_EFFORT = ("none", "disable")


def chat_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Plain dicts with what LiteLLM leaves to the provider put right: OpenAI's ``developer`` role is a system message, and an
    assistant's ``content: None``, which LiteLLM removes, is an empty text.

    Raises:
        InvalidRequestError: there are none, or one is no dict with a role. What a message holds is checked by the engine.
    """
    if not messages:
        raise InvalidRequestError("messages is empty; pass at least one message with a role and a content")
    plain = [dict(m.model_dump(exclude_none=True)) if hasattr(m, "model_dump") else m for m in messages]
    for message in plain:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"each message must be a dict with a role and a content, got {shortened(message)}")
    return [_repaired(message) for message in plain]


def _repaired(message: Mapping[str, Any]) -> dict[str, Any]:
    repaired = dict(message)
    if message["role"] == "developer":
        repaired["role"] = "system"
    if message["role"] == "assistant" and message.get("content") is None:
        repaired["content"] = ""
    return repaired


def template_options(wanted: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keyword arguments of the chat template.

    An assistant's message that the model is to go on with is marked by ``continue_final_message``, or by ``prefix`` in the
    message itself, as LiteLLM has it for other providers. No further assistant's turn is begun then.
    """
    options: dict[str, Any] = {
        name: flag(wanted, name, False) for name in CHAT_TEMPLATE & wanted.keys() - {"chat_template_kwargs"}
    }
    last = messages[-1]
    if last["role"] == "assistant" and last.get("prefix") is True:
        options.setdefault("continue_final_message", True)
    if options.get("continue_final_message"):
        options.setdefault("add_generation_prompt", False)
    template = mapping(wanted, "chat_template_kwargs")
    thinks = _thinks(wanted)
    if thinks is not None:  # a switch given by name counts more
        template = {"enable_thinking": thinks, **(template or {})}
    if template is not None:
        options["chat_template_kwargs"] = template
    return options


def _thinks(wanted: Mapping[str, Any]) -> bool | None:
    """Whether the model is to reason, by OpenAI's ``reasoning_effort`` or Anthropic's ``thinking``; None: nothing is said."""
    effort, thinking = wanted.get("reasoning_effort"), wanted.get("thinking")
    if thinking is not None:
        kind = thinking.get("type") if isinstance(thinking, Mapping) else None
        if kind not in ("enabled", "adaptive", "disabled"):
            raise InvalidRequestError(
                f'thinking must be {{"type": "enabled"}} or {{"type": "disabled"}}, got {shortened(thinking)}'
            )
        return bool(kind != "disabled")
    if effort is None:
        return None
    if isinstance(effort, Mapping):  # LiteLLM's bridge from the Responses API
        effort = effort.get("effort")
    if effort not in EFFORTS:
        raise InvalidRequestError(f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {shortened(effort)}")
    return effort not in NO_EFFORT


def thinking_budget(wanted: Mapping[str, Any]) -> int | None:
    """Most tokens of reasoning: Anthropic's ``budget_tokens``, if the model is to reason at all."""
    thinking = wanted.get("thinking")
    if not isinstance(thinking, Mapping) or thinking.get("type") == "disabled" or thinking.get("budget_tokens") is None:
        return None
    return integer(thinking, "budget_tokens", 0)


def raw_prompts(messages: Sequence[Any], token_ids: object) -> tuple[str | list[int], ...]:
    """The prompts of a text completion. LiteLLM wraps each string in a user message and knows no token ids, so those come in
    ``prompt_token_ids`` (one list, or one list a prompt) beside an empty prompt."""
    texts = [m.get("content") for m in messages if isinstance(m, Mapping)]
    if token_ids is None:
        if not texts:
            raise InvalidRequestError("there is no prompt; pass prompt='…' or a list of prompts")
        for text in texts:
            if not isinstance(text, str):
                raise InvalidRequestError(f"a prompt must be a string, got {shortened(text)}; token ids go in prompt_token_ids")
        return tuple(text for text in texts if isinstance(text, str))
    if any(texts):
        raise InvalidRequestError("give either a prompt or prompt_token_ids; with prompt_token_ids pass prompt=''")
    if not isinstance(token_ids, list) or not token_ids:
        raise InvalidRequestError(f"prompt_token_ids must be a non-empty list of token ids, got {shortened(token_ids)}")
    return tuple(list(ids) for ids in token_ids) if all(isinstance(ids, list) for ids in token_ids) else (list(token_ids),)
