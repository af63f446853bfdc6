"""Engine results as LiteLLM's response objects. Imports LiteLLM, so only the handler imports this module.

One function computes usage, from the engine's own counts, for every call style: a streamed and a whole answer cannot differ.
"""

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from litellm import Choices, Message, ModelResponse, Usage
from litellm.types.utils import (
    ChatCompletionDeltaToolCall,
    ChatCompletionMessageToolCall,
    ChoiceLogprobs,
    Delta,
    Function,
    ModelResponseStream,
    PromptTokensDetailsWrapper,
    StreamingChoices,
)

from minivllm_adapters.logprobs import chat_logprobs, prompt_logprobs
from minivllm_adapters.params import CallPlan
from minivllm_plugin.errors import MinivllmError, RequestAbortedError, RequestFailedError
from minivllm_plugin.parsing.chat_output import ChatOutputParser

if TYPE_CHECKING:
    from minivllm_plugin.serving.llm import LLM
    from minivllm_plugin.serving.outputs import CompletionOutput, RequestOutput

__all__ = [
    "ChunkFactory",
    "answer_parser",
    "finish_reason",
    "new_call_id",
    "no_end",
    "response_id",
    "tool_call",
    "usage_of",
    "whole_response",
]


def response_id(request_id: str, *, chat: bool) -> str:
    """OpenAI's form of an id, with the engine's request id inside, so that a log line leads to the request."""
    return f"{'chatcmpl' if chat else 'cmpl'}-{request_id}"


def finish_reason(reason: str | None, request_id: str) -> str:
    """``stop`` or ``length``.

    Raises:
        RequestAbortedError: somebody other than the consumer aborted the request.
        RequestFailedError: the request ended for any other reason, or without one; never reported as a normal end.
    """
    if reason in ("stop", "length"):
        return reason
    raise no_end(reason, request_id)


def no_end(reason: str | None, request_id: str) -> MinivllmError:
    """The error of a request that is over without having come to an end of its own."""
    if reason == "abort":
        return RequestAbortedError(f"request {request_id} was aborted before it ended; send it again if that was not meant")
    return RequestFailedError(f"request {request_id} ended with reason {reason!r} instead of stop or length")


def usage_of(outputs: Sequence["RequestOutput"]) -> Usage:
    """Tokens of one call as OpenAI counts them: each prompt once however many choices it has, every completion token."""
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    num_completion_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=PromptTokensDetailsWrapper(cached_tokens=sum(output.num_cached_tokens or 0 for output in outputs)),
    )


def whole_response(model: str, plan: CallPlan, outputs: Sequence["RequestOutput"], llm: "LLM") -> ModelResponse:
    """The answer of a call that does not stream; choices are ordered by prompt, then by choice."""
    choices: list[Choices] = []
    for number, output in enumerate(outputs):
        for completion in _chosen(plan, output):
            reason = finish_reason(completion.finish_reason, output.request_id)
            if plan.messages is None:
                text = _prompt_text(plan, number, llm) + completion.text if plan.report.echo else completion.text
                message = Message(role="assistant", content=text)
            else:
                message, reason = _message(plan, answer_parser(llm, plan, output.prompt_token_ids), completion.text, reason)
            choice = Choices(index=len(choices), finish_reason=reason, message=message)
            if plan.report.num_top_logprobs is not None:
                choice.logprobs = chat_logprobs(completion.logprobs, plan.report.num_top_logprobs, llm.tokenizer)
            choices.append(choice)
    response = ModelResponse(
        id=response_id(plan.request_id or outputs[0].request_id, chat=plan.messages is not None),
        created=int(time.time()),
        model=model,
        choices=choices,
        usage=usage_of(outputs),
    )
    if outputs[0].prompt_logprobs is not None:  # of a chat: it has one prompt
        response.prompt_logprobs = prompt_logprobs(outputs[0].prompt_logprobs)  # where vLLM's server has them
    return response


def tool_call(identity: str, index: int, name: str | None, arguments: str) -> ChatCompletionDeltaToolCall:
    """One call, or a piece of one, as a chunk carries it."""
    return ChatCompletionDeltaToolCall(
        id=identity if name is not None else None,
        type="function",
        index=index,
        function=Function(name=name, arguments=arguments),
    )


def new_call_id() -> str:
    """OpenAI's form: ``call_`` and 24 letters and digits."""
    return f"call_{secrets.token_hex(12)}"


def answer_parser(llm: "LLM", plan: CallPlan, prompt_token_ids: Sequence[int]) -> ChatOutputParser:
    """What takes one answer apart. The text of a text completion stays as it is, and so does an answer of a fixed form, even if
    the prompt has opened a passage of reasoning: the form has no place for its end."""
    if plan.messages is None:
        return ChatOutputParser()
    return llm.output_parser(plan.tools.tools, prompt_token_ids=prompt_token_ids, reasoning=not plan.has_fixed_form)


def _message(plan: CallPlan, parser: ChatOutputParser, text: str, reason: str) -> tuple[Message, str]:
    answer = parser.parse(text)
    calls = [
        ChatCompletionMessageToolCall(
            id=new_call_id(), type="function", function=Function(name=call.name, arguments=call.arguments)
        )
        for index, call in enumerate(answer.calls)
        if plan.tools.takes_call(index)
    ]
    message = Message(
        role="assistant",
        content=answer.text or (None if calls else ""),
        tool_calls=calls or None,
        reasoning_content=answer.reasoning or None,
    )
    return message, "tool_calls" if calls and reason == "stop" else reason


def _chosen(plan: CallPlan, output: "RequestOutput") -> "list[CompletionOutput]":
    """With ``best_of``, those with the highest mean log-probability a token; else all, in order."""
    completions = list(output.outputs)
    if len(completions) > plan.report.choices_per_prompt:
        completions.sort(key=lambda one: -(one.cumulative_logprob or 0.0) / max(1, len(one.token_ids)))
    return completions[: plan.report.choices_per_prompt]


def _prompt_text(plan: CallPlan, number: int, llm: "LLM") -> str:
    prompt = plan.prompts[number]
    if isinstance(prompt, str):
        return prompt
    return "" if llm.tokenizer is None else llm.tokenizer.decode(prompt)


class ChunkFactory:
    """The chunks of one stream: same id, model and creation time on all, the role on the first of each choice that carries
    anything.

    LiteLLM reads only the first entry of a chunk's ``choices`` and takes the first reason it meets for that of the whole
    stream. So a reason of a later choice travels as a second entry, and that of choice 0 comes last.
    """

    def __init__(self, model: str, identity: str) -> None:
        self._model = model
        self._identity = identity
        self._created: int | None = None  # set with the first chunk: LiteLLM stamps the chunks that it makes itself then
        self._begun: set[int] = set()

    def piece(self, index: int, logprobs: ChoiceLogprobs | None = None, **content: Any) -> ModelResponseStream:
        """A piece of choice ``index``: ``content``, ``reasoning_content`` or ``tool_calls``."""
        role = None if index in self._begun else "assistant"
        self._begun.add(index)
        choice = StreamingChoices(index=index, delta=Delta(role=role, **content), logprobs=logprobs)
        return self._chunk([choice])

    def end_of_choice(self, index: int, reason: str) -> ModelResponseStream:
        """The end of a choice other than 0."""
        role = None if index in self._begun else "assistant"
        empty = StreamingChoices(index=0, delta=Delta())
        return self._chunk([empty, StreamingChoices(index=index, delta=Delta(role=role), finish_reason=reason)])

    def end(self, reason: str, usage: Usage) -> list[ModelResponseStream]:
        """The last chunks, with the reason of choice 0. Usage goes before: LiteLLM stops listening once it has seen a reason."""
        head = [] if 0 in self._begun else [self.piece(0, content="")]  # an empty answer still says whose it is
        counted = self._chunk([StreamingChoices(index=0, delta=Delta())])
        counted.usage = usage
        return [*head, counted, self._chunk([StreamingChoices(index=0, delta=Delta(), finish_reason=reason)])]

    def _chunk(self, choices: list[StreamingChoices]) -> ModelResponseStream:
        self._created = self._created or int(time.time())
        return ModelResponseStream(id=self._identity, created=self._created, model=self._model, choices=choices)
