"""What a LiteLLM call asks for, as a plan: prompts, changes to the sampling defaults, template and queue options.

Pure: no LiteLLM, no model, no engine; runs on the caller's thread before anything is loaded or queued. Nothing is dropped in
silence: a parameter is honoured, has its neutral value, stands in the ``IGNORED`` list with a reason, or is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm_adapters.format_params import wanted_format
from minivllm_adapters.parameters_table import (
    ALIASES,
    CHAT_TEMPLATE,
    HINTS,
    IGNORED,
    NEUTRAL_ONLY,
    OPENAI,
    REASONING,
    SAMPLING,
    SUPPORTED,
)
from minivllm_adapters.tool_params import ToolPlan, wanted_tools
from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.structured.tool_grammar import tool_grammar

__all__ = ["CallPlan", "plan_call"]

MAX_BEST_OF = 128
TEXT_COMPLETION_MAX_TOKENS = 16  # the completions API's documented default, in OpenAI, LiteLLM and vLLM alike
STREAM_OPTIONS = frozenset({"include_usage", "include_obfuscation"})  # LiteLLM adds the usage chunk; obfuscation is transport


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One LiteLLM call, understood and checked as far as that is possible without the model.

    Attributes:
        messages: the conversation, or None for a text completion.
        prompts: raw prompts of a text completion, as strings or token ids; empty for a chat.
        choices_per_prompt: choices returned for each prompt, OpenAI's ``n``.
        sampling: fields to change in the model's default sampling parameters; its ``n`` counts what is generated.
        template: keyword arguments of the chat template.
        tools: what may be called.
        echo: the prompt's text goes before each completion's.
        num_top_logprobs: of the most likely tokens, told at each place; None: none are asked for.
        priority: smaller is served earlier under the engine's priority policy.
        cache_salt: prefixes are shared only between requests with an equal salt.
        request_id: the caller's id, or None to have one made.
    """

    messages: list[dict[str, Any]] | None
    prompts: tuple[str | list[int], ...] = ()
    choices_per_prompt: int = 1
    sampling: Mapping[str, object] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    tools: ToolPlan = field(default_factory=ToolPlan)
    echo: bool = False
    num_top_logprobs: int | None = None
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    metadata: Mapping[str, Any] | None = None

    @property
    def num_requests(self) -> int:
        """Engine requests that this call needs: one a prompt, however many choices it has."""
        return 1 if self.messages is not None else len(self.prompts)

    def sampling_params(self, defaults: SamplingParams, tool_format: str = "hermes") -> SamplingParams:
        """The parameters of each request.

        Args:
            defaults: of the model.
            tool_format: in which it writes tool calls; calls that must be made are forced into it.

        Raises:
            InvalidRequestError: a value is out of range; names field, value and range.
            UnsupportedFeatureError: calls in this format cannot be forced.
        """
        params = defaults.replace(**self.sampling)
        if not self.tools.must_call:
            return params
        form = tool_grammar(self.tools.tools, tool_format=tool_format, only=self.tools.only, parallel=self.tools.parallel)
        return params.replace(structured_outputs=form)

    def request_name(self, index: int) -> str | None:
        """The caller's request id, numbered when the call needs several requests (ids are unique in the engine)."""
        return self.request_id if self.request_id is None or self.num_requests == 1 else f"{self.request_id}-{index}"


def plan_call(
    messages: Sequence[Any], optional_params: Mapping[str, Any], *, text_completion: bool, stream: bool, drop_unsupported: bool
) -> CallPlan:
    """Read one call.

    Args:
        messages: as LiteLLM hands them over; of a text completion, one user message a prompt.
        optional_params: every keyword that LiteLLM did not keep for itself; ``extra_body`` is merged and wins.
        text_completion: prompts go to the model as they are, without the chat template.
        stream: choices cannot be chosen from, nor several prompts told apart, in a stream.
        drop_unsupported: LiteLLM's ``drop_params``: leave out OpenAI parameters that are not supported instead of refusing.

    Raises:
        UnsupportedFeatureError: a parameter is unknown, or known and not supported with this value.
        InvalidRequestError: a value has the wrong type or range.
    """
    wanted = _wanted(optional_params, drop_unsupported=drop_unsupported)
    prompts = _prompts(messages, wanted.get("prompt_token_ids")) if text_completion else ()
    if stream and len(prompts) > 1:
        raise UnsupportedFeatureError(f"{len(prompts)} prompts are not supported with stream=True; make one call a prompt")
    if not text_completion and "prompt_token_ids" in wanted:
        raise UnsupportedFeatureError("prompt_token_ids has no meaning beside chat messages; use litellm.text_completion")
    if text_completion and (template := sorted((CHAT_TEMPLATE | REASONING) & wanted.keys())):
        raise UnsupportedFeatureError(f"{template[0]} has no meaning in a text completion: no chat template is applied")
    sampling = {name: wanted[name] for name in SAMPLING & wanted.keys()}
    if text_completion:
        sampling.setdefault("max_tokens", TEXT_COMPLETION_MAX_TOKENS)
    tools = wanted_tools(wanted)
    if text_completion and tools.tools:
        raise UnsupportedFeatureError("tools have no meaning in a text completion: no chat template is applied")
    sampling["structured_outputs"] = wanted_format(wanted)
    if tools.must_call and sampling["structured_outputs"] is not None:
        raise InvalidRequestError("tool_choice forces a call and response_format another form; leave one of them out")
    num_top = _logprobs(wanted, text_completion=text_completion)
    choices = _integer(wanted, "n", 1)
    if _best_of(wanted, choices, stream=stream, text_completion=text_completion) > choices:
        sampling["n"] = wanted["best_of"]
    if num_top is not None or sampling.get("n", 1) != choices:
        sampling["logprobs"] = num_top or 0
    SamplingParams(max_tokens=None).replace(**sampling)  # a bad value is told before a model is loaded for it
    return CallPlan(
        messages=None if text_completion else _chat_messages(messages),
        prompts=prompts,
        choices_per_prompt=choices,
        sampling=sampling,
        template=_template(wanted),
        tools=tools,
        echo=_echo(wanted, stream=stream, text_completion=text_completion),
        num_top_logprobs=num_top,
        priority=_integer(wanted, "priority", 0),
        cache_salt=_text(wanted, "cache_salt"),
        request_id=_text(wanted, "request_id"),
        metadata=_mapping(wanted, "request_metadata"),
    )


def _logprobs(wanted: Mapping[str, Any], *, text_completion: bool) -> int | None:
    """How many of the most likely tokens are told at each place; None: no log-probabilities are asked for."""
    asked, top = wanted.get("logprobs", False), wanted.get("top_logprobs", 0)
    if isinstance(top, bool) or not isinstance(top, int):
        raise InvalidRequestError(f"top_logprobs must be an integer, got {top!r}")
    if text_completion and asked is not False:
        raise UnsupportedFeatureError(
            "logprobs of a text completion do not get through LiteLLM; use litellm.completion(logprobs=True, top_logprobs=…)"
        )
    if not isinstance(asked, bool):
        raise InvalidRequestError(f"logprobs must be True or False in a chat, got {asked!r}; their number is top_logprobs")
    if top and not asked:
        raise InvalidRequestError(f"top_logprobs={top} needs logprobs=True")
    return top if asked else None


def _best_of(wanted: Mapping[str, Any], choices: int, *, stream: bool, text_completion: bool) -> int:
    best_of = _integer(wanted, "best_of", choices)
    if not choices <= best_of <= MAX_BEST_OF:
        raise InvalidRequestError(f"best_of={best_of} must be between n={choices} and {MAX_BEST_OF}")
    if best_of > choices and (stream or not text_completion):
        raise UnsupportedFeatureError(f"best_of={best_of} needs a text completion that is not streamed: it chooses at the end")
    return best_of


def _echo(wanted: Mapping[str, Any], *, stream: bool, text_completion: bool) -> bool:
    echo = wanted.get("echo", False)
    if not isinstance(echo, bool):
        raise InvalidRequestError(f"echo must be True or False, got {echo!r}")
    if echo and (stream or not text_completion):
        raise UnsupportedFeatureError("echo needs a text completion that is not streamed")
    return echo


def _wanted(optional_params: Mapping[str, Any], *, drop_unsupported: bool) -> dict[str, Any]:
    """The supported parameters that are set, under their own names; the others are checked and left out."""
    extra = optional_params.get("extra_body") or {}
    if not isinstance(extra, Mapping):
        raise InvalidRequestError(f"extra_body must be a dict of parameters, got {extra!r}")
    given = {k: v for k, v in {**optional_params, **extra}.items() if v is not None and k != "extra_body"}
    for name in given.keys() - SUPPORTED - IGNORED.keys():
        _check_without_effect(name, given[name], drop_unsupported=drop_unsupported)
    wanted = {name: value for name, value in given.items() if name in SUPPORTED}
    for alias, name in ALIASES.items():
        if alias in wanted:
            wanted[name] = wanted.pop(alias)
    return wanted


def _check_without_effect(name: str, value: object, *, drop_unsupported: bool) -> None:
    hint = f"; {HINTS[name]}" if name in HINTS else ""
    if name == "stream_options":
        unknown = sorted(value.keys() - STREAM_OPTIONS) if isinstance(value, Mapping) else [repr(value)]
        if unknown:
            raise UnsupportedFeatureError(f"stream_options: {unknown[0]} is not supported; supported is include_usage")
        return
    if name not in NEUTRAL_ONLY:
        raise UnsupportedFeatureError(f"unknown parameter {name}={value!r}{hint}; supported are {', '.join(sorted(SUPPORTED))}")
    if any(_same(value, neutral) for neutral in NEUTRAL_ONLY[name]) or (drop_unsupported and name in OPENAI):
        return
    raise UnsupportedFeatureError(f"{name}={_short(value)} is not supported by minivllm{hint or '; leave it out'}")


def _same(value: object, neutral: object) -> bool:
    """Equality that tells False from 0 and True from 1: ``logprobs=0`` asks for something, ``logprobs=False`` does not."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _integer(wanted: Mapping[str, Any], name: str, default: int) -> int:
    value = wanted.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name} must be an integer, got {value!r}")
    return value


def _text(wanted: Mapping[str, Any], name: str) -> str | None:
    value = wanted.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise InvalidRequestError(f"{name} must be a non-empty string, got {value!r}")
    return value


def _mapping(wanted: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    value = wanted.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InvalidRequestError(f"{name} must be a dict, got {value!r:.100}")
    return value


def _thinks(wanted: Mapping[str, Any]) -> bool | None:
    """Whether the model is to reason, by OpenAI's ``reasoning_effort`` or Anthropic's ``thinking``; None: nothing is said."""
    effort, thinking = wanted.get("reasoning_effort"), wanted.get("thinking")
    if thinking is not None:
        kind = thinking.get("type") if isinstance(thinking, Mapping) else None
        if kind not in ("enabled", "adaptive", "disabled"):
            raise InvalidRequestError(f'thinking must be {{"type": "enabled"}} or {{"type": "disabled"}}, got {thinking!r:.100}')
        return bool(kind != "disabled")
    if effort is None:
        return None
    if isinstance(effort, Mapping):  # LiteLLM's bridge from the Responses API
        effort = effort.get("effort")
    if not isinstance(effort, str):
        raise InvalidRequestError(f"reasoning_effort must be none, minimal, low, medium or high, got {effort!r:.100}")
    return effort not in ("none", "disable")


def _template(wanted: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: wanted[name] for name in sorted(CHAT_TEMPLATE & wanted.keys())}
    for name, value in options.items():
        kind, what = (Mapping, "a dict") if name == "chat_template_kwargs" else (bool, "True or False")
        if not isinstance(value, kind):
            raise InvalidRequestError(f"{name} must be {what}, got {value!r}")
    thinks = _thinks(wanted)
    if thinks is not None:  # a switch given by name counts more
        options["chat_template_kwargs"] = {"enable_thinking": thinks, **options.get("chat_template_kwargs", {})}
    return options


def _chat_messages(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Plain dicts with what LiteLLM leaves to the provider put right: OpenAI's ``developer`` role is a system message, and a
    ``content: None`` that LiteLLM removed is an empty text."""
    if not messages:
        raise InvalidRequestError("messages is empty; pass at least one message with a role and a content")
    plain = [dict(m.model_dump(exclude_none=True)) if hasattr(m, "model_dump") else m for m in messages]
    for message in plain:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"each message must be a dict with a role and a content, got {_short(message)}")
    return [{**message, **_repaired(message)} for message in plain]


def _repaired(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message.get("content")
    return {"role": "system" if role == "developer" else role, "content": "" if content is None else content}


def _prompts(messages: Sequence[Any], token_ids: object) -> tuple[str | list[int], ...]:
    """The prompts of a text completion. LiteLLM wraps each string in a user message and knows no token ids, so those come in
    ``prompt_token_ids`` (one list, or one list a prompt) beside an empty prompt."""
    texts = [m.get("content") for m in messages if isinstance(m, Mapping)]
    if token_ids is None:
        if not texts:
            raise InvalidRequestError("there is no prompt; pass prompt='…' or a list of prompts")
        for text in texts:
            if not isinstance(text, str):
                raise InvalidRequestError(f"a prompt must be a string, got {_short(text)}; token ids go in prompt_token_ids")
        return tuple(text for text in texts if isinstance(text, str))
    if any(texts):
        raise InvalidRequestError("give either a prompt or prompt_token_ids; with prompt_token_ids pass prompt=''")
    if not isinstance(token_ids, list) or not token_ids:
        raise InvalidRequestError(f"prompt_token_ids must be a non-empty list of token ids, got {_short(token_ids)}")
    return tuple(list(ids) for ids in token_ids) if all(isinstance(ids, list) for ids in token_ids) else (list(token_ids),)
