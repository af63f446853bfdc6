"""Messages become prompt token ids through the model's chat template.

The template is rendered by transformers' own renderer (immutable Jinja sandbox: no files, no attributes of Python
objects), so a template means here what it means there. Control tokens come from the template alone: what a user typed
that looks like one goes through the template as a placeholder and is encoded as plain text. Added tokens that are not
special (Qwen's ``<think>``, ``<tool_call>``) are recognised everywhere, as in transformers. No state; any thread.
"""

from collections.abc import Mapping
from typing import Any

from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.serving.messages import normalize_messages, normalize_tools, plain_data
from minivllm_plugin.serving.text_guard import TextGuard
from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.serving.tool_prompt import describe_tools

__all__ = ["render_chat"]

# Arguments of the renderer itself; as template variables they would silently replace each other.
RESERVED_VARIABLES = frozenset(
    {
        "conversations",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "return_assistant_tokens_mask",
    }
)


def render_chat(
    tokenizer: Tokenizer,
    messages: object,
    *,
    tools: object = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    chat_template: str | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of a conversation: exactly the template's control tokens, BOS included.

    Args:
        tokenizer: brings vocabulary and templates.
        messages: list of dicts or objects with ``model_dump()``, see :func:`normalize_messages`.
        tools: functions the model may call, in OpenAI's form. A template that has no place for them gets them as text.
        add_generation_prompt: end with the header of an assistant's turn.
        continue_final_message: leave the last message open, so that the model goes on with it. Excludes
            ``add_generation_prompt``.
        chat_template: Jinja text, or the name of one of the model's templates; default is the model's own (its
            ``tool_use`` template when there is one and tools are given).
        template_kwargs: further variables for the template, such as ``enable_thinking``.

    Raises:
        InvalidRequestError: malformed messages, tools or variables; no template; or the template refused (its text is given).
        UnsupportedFeatureError: media parts.
    """
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message exclude each other; set add_generation_prompt=False to continue"
        )
    plain_tools = normalize_tools(tools)
    template = _choose_template(tokenizer, chat_template, with_tools=plain_tools is not None)
    plain_messages = normalize_messages(messages, template)
    if "tools" not in template and (plain_tools is not None or any("tool_calls" in m for m in plain_messages)):
        plain_messages = describe_tools(plain_messages, plain_tools or [])
        plain_tools = None
    variables = plain_data(dict(template_kwargs or {}), "template_kwargs")
    if clash := sorted(RESERVED_VARIABLES & variables.keys()):
        raise InvalidRequestError(f"template_kwargs cannot set {clash[0]!r}; it is an argument of its own")

    guard = TextGuard.of(tokenizer.control_tokens, [plain_messages, plain_tools, variables], template)
    text = _render(
        template,
        guard.protect(plain_messages),
        guard.protect(plain_tools),
        {**tokenizer.named_tokens, **guard.protect(variables)},
        add_generation_prompt,
        continue_final_message,
    )
    return tokenizer.encode_rendered(guard.restore_escapes(text), guard.literals, guard.joint)


def _choose_template(tokenizer: Tokenizer, wanted: str | None, *, with_tools: bool) -> str:
    if wanted is not None:
        if not isinstance(wanted, str):
            raise InvalidRequestError(f"chat_template must be Jinja text or a template's name, got {wanted!r:.100}")
        return tokenizer.chat_templates.get(wanted, wanted)
    if with_tools and "tool_use" in tokenizer.chat_templates:
        return tokenizer.chat_templates["tool_use"]
    if tokenizer.chat_template is not None:
        return tokenizer.chat_template
    if tokenizer.chat_templates:
        raise InvalidRequestError(
            f"this model has the chat templates {', '.join(tokenizer.chat_templates)} and no default; pass chat_template=…"
        )
    raise InvalidRequestError(
        "this model has no chat template (it may be a base model); pass chat_template=…, or render the prompt yourself "
        "and give the text to generate()"
    )


def _render(
    template: str,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: Mapping[str, Any],
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> str:
    # transformers without torch still takes half a second to import; completions never need it.
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered: Any = render_jinja_template(  # annotated as str, returns (texts, indices)
            conversations=[messages],
            tools=list(tools) if tools else None,
            chat_template=template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            **variables,
        )
    except TemplateError as error:
        raise InvalidRequestError(f"the chat template refused this conversation: {error}") from error
    except Exception as error:  # a template is a program; it fails in any way on input it was not written for
        raise InvalidRequestError(f"the chat template failed on this conversation: {type(error).__name__}: {error}") from error
    return str(rendered[0][0])
