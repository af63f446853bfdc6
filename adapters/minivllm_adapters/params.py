"""What a LiteLLM call asks for, as a plan: prompts, changes to the sampling defaults, template and queue options.

Pure: no LiteLLM, no model, no engine; runs on the caller's thread before anything is loaded or queued. Nothing is dropped in
silence: a parameter is honoured, has its neutral value, stands in the ``IGNORED`` list with a reason, or is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm_adapters.format_params import wanted_format
from minivllm_adapters.parameters_table import ALIASES, HINTS, IGNORED, NEUTRAL_ONLY, OPENAI, SAMPLING, SUPPORTED
from minivllm_adapters.prompt_params import (
    CHAT_TEMPLATE,
    REASONING,
    chat_messages,
    raw_prompts,
    template_options,
    thinking_budget,
)
from minivllm_adapters.report_params import ReportPlan, wanted_report
from minivllm_adapters.tool_params import TOOLS, ToolPlan, wanted_tools
from minivllm_adapters.value_checks import integer, mapping, shortened, text
from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.structured import StructuredOutputsParams
from minivllm_plugin.structured.tool_grammar import tool_grammar

__all__ = ["CallPlan", "plan_call"]

TEXT_COMPLETION_MAX_TOKENS = 16  # the completions API's documented default, in OpenAI, LiteLLM and vLLM alike
STREAM_OPTIONS = frozenset({"include_usage", "include_obfuscation"})  # LiteLLM adds the usage chunk; obfuscation is transport


@dataclass(frozen=True, slots=True)
class CallPlan:
    """One LiteLLM call, understood and checked as far as that is possible without the model.

    Attributes:
        messages: the conversation, or None for a text completion.
        prompts: raw prompts of a text completion, as strings or token ids; empty for a chat.
        report: what is returned of what is generated.
        sampling: fields to change in the model's default sampling parameters.
        template: keyword arguments of the chat template.
        tools: what may be called.
        priority: smaller is served earlier under the engine's priority policy.
        cache_salt: prefixes are shared only between requests with an equal salt.
        request_id: the caller's id, or None to have one made.
        metadata: for plugins.
    """

    messages: list[dict[str, Any]] | None
    prompts: tuple[str | list[int], ...] = ()
    report: ReportPlan = field(default_factory=ReportPlan)
    sampling: Mapping[str, object] = field(default_factory=dict)
    template: Mapping[str, Any] = field(default_factory=dict)
    tools: ToolPlan = field(default_factory=ToolPlan)
    priority: int = 0
    cache_salt: str | None = None
    request_id: str | None = None
    metadata: Mapping[str, Any] | None = None

    @property
    def num_requests(self) -> int:
        """Engine requests that this call needs: one a prompt, however many choices it has."""
        return 1 if self.messages is not None else len(self.prompts)

    @property
    def has_fixed_form(self) -> bool:
        """Whether the answer's form is forced from its first token on. Such an answer holds no reasoning."""
        form = self.sampling.get("structured_outputs")
        return self.tools.must_call or (isinstance(form, StructuredOutputsParams) and form.kind != "structural_tag")

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
    prompts = raw_prompts(messages, wanted.get("prompt_token_ids")) if text_completion else ()
    if stream and len(prompts) > 1:
        raise UnsupportedFeatureError(f"{len(prompts)} prompts are not supported with stream=True; make one call a prompt")
    _check_kind(wanted, text_completion=text_completion)
    chat = None if text_completion else chat_messages(messages)
    report = wanted_report(wanted, stream=stream, text_completion=text_completion)
    tools = wanted_tools(wanted)
    form = wanted_format(wanted)
    if tools.must_call and form is not None:
        raise InvalidRequestError("tool_choice forces a call and response_format another form; leave one of them out")
    sampling = {name: wanted[name] for name in SAMPLING & wanted.keys()} | report.sampling
    if form is not None:
        sampling["structured_outputs"] = form
    if (budget := thinking_budget(wanted)) is not None:
        sampling.setdefault("thinking_token_budget", budget)
    if text_completion:
        sampling.setdefault("max_tokens", TEXT_COMPLETION_MAX_TOKENS)
    SamplingParams(max_tokens=None).replace(**sampling)  # a bad value is told before a model is loaded for it
    return CallPlan(
        messages=chat,
        prompts=prompts,
        report=report,
        sampling=sampling,
        template={} if chat is None else template_options(wanted, chat),
        tools=tools,
        priority=integer(wanted, "priority", 0),
        cache_salt=text(wanted, "cache_salt"),
        request_id=text(wanted, "request_id"),
        metadata=mapping(wanted, "request_metadata"),
    )


def _check_kind(wanted: Mapping[str, Any], *, text_completion: bool) -> None:
    """Refuse what means nothing in this kind of call."""
    if not text_completion and "prompt_token_ids" in wanted:
        raise UnsupportedFeatureError("prompt_token_ids has no meaning beside chat messages; use litellm.text_completion")
    of_chats = sorted(name for name in (CHAT_TEMPLATE | REASONING | TOOLS) & wanted.keys() if wanted[name] not in ([], "none"))
    if text_completion and of_chats:
        raise UnsupportedFeatureError(f"{of_chats[0]} has no meaning in a text completion: no chat template is applied")


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
    raise UnsupportedFeatureError(f"{name}={shortened(value)} is not supported by minivllm{hint or '; leave it out'}")


def _same(value: object, neutral: object) -> bool:
    """Equality that tells False from 0 and True from 1: ``logprobs=0`` asks for something, ``logprobs=False`` does not."""
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral
