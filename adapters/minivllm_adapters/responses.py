"""Engine results as LiteLLM's response objects. Imports LiteLLM, so only the handler imports this module.

One function computes usage, from the engine's own counts, for every call style: a streamed and a whole answer cannot differ.
"""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from litellm import Choices, Message, ModelResponse, Usage
from litellm.types.utils import Delta, ModelResponseStream, PromptTokensDetailsWrapper, StreamingChoices

from minivllm_adapters.params import CallPlan
from minivllm_plugin.errors import MinivllmError, RequestAbortedError, RequestFailedError

if TYPE_CHECKING:
    from minivllm_plugin.serving.outputs import RequestOutput

__all__ = ["ChunkFactory", "finish_reason", "no_end", "response_id", "usage_of", "whole_response"]


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


def usage_of(outputs: Sequence["RequestOutput"], choices_per_prompt: int = 1) -> Usage:
    """Tokens of one call as OpenAI counts them: each prompt once however many choices it has, every completion token."""
    prompts = outputs[::choices_per_prompt]
    num_prompt_tokens = sum(len(output.prompt_token_ids) for output in prompts)
    num_completion_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return Usage(
        prompt_tokens=num_prompt_tokens,
        completion_tokens=num_completion_tokens,
        total_tokens=num_prompt_tokens + num_completion_tokens,
        prompt_tokens_details=PromptTokensDetailsWrapper(cached_tokens=sum(output.num_cached_tokens or 0 for output in prompts)),
    )


def whole_response(model: str, plan: CallPlan, outputs: Sequence["RequestOutput"]) -> ModelResponse:
    """The answer of a call that does not stream; choices are ordered by prompt, then by choice."""
    choices = [
        Choices(
            index=index,
            finish_reason=finish_reason(output.outputs[0].finish_reason, output.request_id),
            message=Message(role="assistant", content=output.outputs[0].text),
        )
        for index, output in enumerate(outputs)
    ]
    return ModelResponse(
        id=response_id(plan.request_id or outputs[0].request_id, chat=plan.messages is not None),
        created=int(time.time()),
        model=model,
        choices=choices,
        usage=usage_of(outputs, plan.choices_per_prompt),
    )


class ChunkFactory:
    """The chunks of one stream: same id, model and creation time on all, the role on the first that carries anything."""

    def __init__(self, model: str, identity: str) -> None:
        self._model = model
        self._identity = identity
        self._created: int | None = None  # set with the first chunk: LiteLLM stamps the chunks that it makes itself then
        self._role: str | None = "assistant"

    def text(self, text: str) -> ModelResponseStream:
        """A piece of the answer."""
        return self._chunk(Delta(role=self._role, content=text))

    def end(self, reason: str, usage: Usage) -> list[ModelResponseStream]:
        """The last chunks. Usage goes before the reason: LiteLLM stops listening once it has seen a reason."""
        head = [self.text("")] if self._role is not None else []  # an empty answer still says whose it is
        return [*head, self._chunk(Delta(), usage=usage), self._chunk(Delta(), reason=reason)]

    def _chunk(self, delta: Delta, *, reason: str | None = None, usage: Usage | None = None) -> ModelResponseStream:
        self._role = None
        self._created = self._created or int(time.time())
        choice = StreamingChoices(index=0, delta=delta, finish_reason=reason)
        chunk = ModelResponseStream(id=self._identity, created=self._created, model=self._model, choices=[choice])
        if usage is not None:
            chunk.usage = usage
        return chunk
