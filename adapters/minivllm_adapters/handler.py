"""The LiteLLM provider itself: six methods that LiteLLM calls, over one submit path. Imports LiteLLM; import this lazily.

Which thread runs what: ``completion`` and ``streaming`` run on the caller's thread. LiteLLM calls ``acompletion`` and
``astreaming`` on a worker of the loop's default executor; the coroutine and the iterator that they return then run on the
caller's loop. Nothing of LiteLLM ever runs on the engine thread, and no event loop thread loads a model or tokenises.

``streaming`` and ``astreaming`` are plain functions that return only once the engine has admitted the request. A refusal
therefore has its true class in the caller's hands; raised later, from the iterator, LiteLLM would wrap it in
``MidStreamFallbackError``.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import litellm
from litellm import EmbeddingResponse, ModelResponse
from litellm.llms.custom_llm import CustomLLM
from litellm.types.utils import ModelResponseStream

from minivllm_adapters import embeddings
from minivllm_adapters.deadlines import Deadline
from minivllm_adapters.embeddings import EmbeddingPlan, embedding_response, plan_embedding
from minivllm_adapters.errors import litellm_error
from minivllm_adapters.loading import ModelLoads, Registry
from minivllm_adapters.model_info import announce
from minivllm_adapters.params import CallPlan, plan_call
from minivllm_adapters.responses import whole_response
from minivllm_adapters.streams import AsyncChunks, SyncChunks

if TYPE_CHECKING:
    from minivllm_plugin.serving.embedding import EmbeddingRequest
    from minivllm_plugin.serving.llm import LLM
    from minivllm_plugin.serving.outputs import RequestOutput
    from minivllm_plugin.serving.stream import RequestStream

__all__ = ["MinivllmProvider", "provider"]

Handle = TypeVar("Handle")


class MinivllmProvider(CustomLLM):
    """``minivllm/<model>`` for LiteLLM. Keeps no state of its own but the loads in progress.

    Args:
        registry: where engines come from; the process-wide :mod:`minivllm_plugin.registry` unless a test says otherwise.
    """

    def __init__(self, registry: Registry | None = None) -> None:
        super().__init__()
        self._loads = ModelLoads(registry)

    # LiteLLM passes keywords only, and a newer one may pass more, hence **kwargs. The base class spells all sixteen out.

    def completion(self, model: str, messages: list[Any], **kwargs: Any) -> ModelResponse:  # type: ignore[override]
        """One whole answer, or one choice a prompt and ``n``."""
        try:
            deadline, plan = _understand(messages, kwargs, stream=False)
            llm = self._loads.open(model, deadline)
            return whole_response(model, plan, _results(_submit(model, llm, plan, deadline)), llm)
        except Exception as error:
            _raise(error, model)

    async def acompletion(self, model: str, messages: list[Any], **kwargs: Any) -> ModelResponse:  # type: ignore[override]
        """The same for an event loop."""
        try:
            deadline, plan = _understand(messages, kwargs, stream=False)
            llm = await self._loads.aopen(model, deadline)
            streams = await _on_worker(deadline, lambda: _submit(model, llm, plan, deadline))
            return whole_response(model, plan, await _aresults(streams), llm)
        except Exception as error:
            _raise(error, model)

    def streaming(self, model: str, messages: list[Any], **kwargs: Any) -> Iterator[ModelResponseStream]:  # type: ignore[override]
        """An iterator over the chunks of an answer that the engine has admitted."""
        try:
            return SyncChunks(*self._admit_stream(model, messages, kwargs))
        except Exception as error:
            _raise(error, model)

    def astreaming(self, model: str, messages: list[Any], **kwargs: Any) -> AsyncIterator[ModelResponseStream]:  # type: ignore[override]
        """An asynchronous iterator; a plain function, because LiteLLM does not await the call."""
        try:
            return AsyncChunks(*self._admit_stream(model, messages, kwargs))
        except Exception as error:
            _raise(error, model)

    def embedding(self, model: str, input: Any, **kwargs: Any) -> EmbeddingResponse:  # type: ignore[override]  # noqa: A002
        """One vector a text."""
        try:
            deadline, plan = Deadline.after(kwargs.get("timeout")), plan_embedding(input, kwargs)
            llm = self._loads.open(model, deadline)
            return embedding_response(model, plan, embeddings.results(_submit_embeddings(model, llm, plan, deadline)))
        except Exception as error:
            _raise(error, model)

    async def aembedding(self, model: str, input: Any, **kwargs: Any) -> EmbeddingResponse:  # type: ignore[override]  # noqa: A002
        """The same for an event loop."""
        try:
            deadline, plan = Deadline.after(kwargs.get("timeout")), plan_embedding(input, kwargs)
            llm = await self._loads.aopen(model, deadline)
            requests = await _on_worker(deadline, lambda: _submit_embeddings(model, llm, plan, deadline))
            return embedding_response(model, plan, await embeddings.aresults(requests))
        except Exception as error:
            _raise(error, model)

    def _admit_stream(
        self, model: str, messages: list[Any], kwargs: dict[str, Any]
    ) -> "tuple[RequestStream, str, CallPlan, LLM]":
        deadline, plan = _understand(messages, kwargs, stream=True)
        llm = self._loads.open(model, deadline)
        [stream] = _submit(model, llm, plan, deadline)
        return stream, model, plan, llm


def _understand(messages: Sequence[Any], kwargs: dict[str, Any], *, stream: bool) -> tuple[Deadline, CallPlan]:
    """The clock starts first: reading the parameters is part of the call."""
    deadline = Deadline.after(kwargs.get("timeout"))
    of_litellm = kwargs.get("litellm_params") or {}
    plan = plan_call(
        messages,
        kwargs.get("optional_params") or {},
        text_completion=of_litellm.get("text_completion") is True,
        stream=stream,
        drop_unsupported=litellm.drop_params is True or of_litellm.get("drop_params") is True,
    )
    return deadline, plan


def _submit(model: str, llm: "LLM", plan: CallPlan, deadline: Deadline) -> "list[RequestStream]":
    """Queue every request of a call, or none: what was queued before a refusal is aborted."""
    if deadline.remaining() == 0.0:
        raise deadline.expired(f"model {model!r} was loading")
    announce(model, llm)
    params = plan.sampling_params(llm.default_sampling_params(), llm.tool_format)
    streams: list[RequestStream] = []
    try:
        for index in range(plan.num_requests):
            queue: dict[str, Any] = {
                "request_id": plan.request_name(index),
                "timeout": deadline.remaining(),
                "priority": plan.priority,
                "cache_salt": plan.cache_salt,
                "metadata": plan.metadata,
            }
            if plan.messages is not None:
                tools = list(plan.tools.tools) or None
                streams.append(llm.submit_chat(plan.messages, params, tools=tools, **plan.template, **queue))
            else:
                streams.append(llm.submit(plan.prompts[index], params, **queue))
    except BaseException:
        _close_all(streams)
        raise
    return streams


def _submit_embeddings(model: str, llm: "LLM", plan: EmbeddingPlan, deadline: Deadline) -> "list[EmbeddingRequest]":
    if deadline.remaining() == 0.0:
        raise deadline.expired(f"model {model!r} was loading")
    announce(model, llm)
    return embeddings.submit(llm, plan, deadline.remaining())


async def _on_worker(deadline: Deadline, submit: Callable[[], list[Handle]]) -> list[Handle]:
    """Submit on a worker thread: chat templates and tokenisers take milliseconds for long prompts. Whoever stops waiting drops
    the requests, and dropping them aborts them."""
    limit = asyncio.timeout(deadline.remaining())
    try:
        async with limit:
            return await asyncio.to_thread(submit)
    except TimeoutError as error:
        if limit.expired():
            raise deadline.expired("the request waited for a worker thread of this event loop") from error
        raise


def _results(streams: "Sequence[RequestStream]") -> "list[RequestOutput]":
    """Wait for every request; one that fails takes the others of the call with it."""
    try:
        return [stream.result() for stream in streams]
    except BaseException:
        _close_all(streams)
        raise


async def _aresults(streams: "Sequence[RequestStream]") -> "list[RequestOutput]":
    """The same on an event loop; a cancelled task aborts them all."""
    try:
        return [await stream.aresult() for stream in streams]
    except BaseException:
        _close_all(streams)
        raise


def _close_all(streams: "Sequence[RequestStream]") -> None:
    for stream in streams:
        stream.close()


def _raise(error: Exception, model: str) -> NoReturn:
    raise litellm_error(error, model) from error


# LiteLLM tells providers apart by object, and its proxy finds one by import path; both must meet this same instance.
provider = MinivllmProvider()
