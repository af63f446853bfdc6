"""The conversations that a caller gives, as prompts of one model. No state but the model's templates; any thread.

How messages become tokens is :mod:`minivllm_plugin.serving.chat`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.serving.chat import render_chat
from minivllm_plugin.serving.prompts import TokenizedPrompt
from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["ConversationRenderer", "Messages", "as_conversation_list", "is_conversation", "template_options"]

Messages = Sequence[Mapping[str, Any]]


class ConversationRenderer:
    """Renders conversations by a model's chat template.

    Args:
        tokenizer: None for a model without one, which refuses conversations.
        chat_template: of the setting: Jinja text or the name of one of the model's own; None is the model's default.
    """

    def __init__(self, tokenizer: Tokenizer | None, chat_template: str | None) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    @property
    def template_text(self) -> str | None:
        """The template that is used when a request brings none, if there is one."""
        wanted, tokenizer = self._chat_template, self._tokenizer
        if tokenizer is None:
            return wanted
        return tokenizer.chat_template if wanted is None else tokenizer.chat_templates.get(wanted, wanted)

    def render(self, messages: Messages, options: Mapping[str, Any]) -> TokenizedPrompt:
        """``messages`` as a prompt; ``options`` come from :func:`template_options`.

        Raises:
            InvalidRequestError: see :func:`minivllm_plugin.serving.chat.render_chat`; or there is no tokenizer.
        """
        if self._tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer (dummy weights); pass token ids to generate() or submit()")
        return TokenizedPrompt(render_chat(self._tokenizer, messages, chat_template=self._chat_template, **options))


def template_options(
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What a caller may say of the rendering, as arguments of :func:`minivllm_plugin.serving.chat.render_chat`."""
    if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
        raise InvalidRequestError(f"chat_template_kwargs must be a dictionary, got {chat_template_kwargs!r:.100}")
    return {
        "tools": tools,
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "template_kwargs": dict(chat_template_kwargs or {}),
    }


def is_conversation(value: object) -> bool:
    """Whether ``value`` is a list of messages rather than a prompt."""
    return isinstance(value, Sequence) and not isinstance(value, str) and bool(value) and isinstance(value[0], Mapping)


def as_conversation_list(messages: object) -> list[Any]:
    """One conversation or several as a list of them; what is neither goes on, to be refused by its name."""
    if isinstance(messages, Sequence) and messages and isinstance(messages[0], Sequence) and not isinstance(messages[0], str):
        return list(messages)
    return [messages]
