"""One streamed answer on its way to LiteLLM. The request was admitted before these objects exist.

Whichever way the reader leaves (``close``, ``aclose``, a dropped reference, a cancelled task, an exception of its own), the
request is aborted; closing twice, or after the end, does nothing. ``close`` never blocks and may run on any thread: LiteLLM's
logging threads can hold the last reference.

Tokens that arrive while the reader is busy come as one delta from the engine's stream, so a slow reader gets fewer, larger
chunks and costs the engine thread nothing.
"""

import contextlib
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from litellm.types.utils import ModelResponseStream

from minivllm_adapters.errors import litellm_error
from minivllm_adapters.logprobs import chat_logprobs
from minivllm_adapters.params import CallPlan
from minivllm_adapters.responses import ChunkFactory, answer_parser, new_call_id, no_end, response_id, tool_call, usage_of
from minivllm_plugin.parsing.chat_output import ChatDelta, ChatOutputParser

if TYPE_CHECKING:
    from minivllm_plugin.serving.llm import LLM
    from minivllm_plugin.serving.logprobs import Logprob
    from minivllm_plugin.serving.outputs import StreamDelta
    from minivllm_plugin.serving.stream import RequestStream

__all__ = ["AsyncChunks", "SyncChunks"]


@dataclass(slots=True)
class _Choice:
    """One completion of the request: its parser, the ids of its calls, log-probabilities that no chunk has carried yet."""

    parser: ChatOutputParser
    call_ids: dict[int, str] = field(default_factory=dict)
    logprobs: "list[dict[int, Logprob]]" = field(default_factory=list)
    reason: str | None = None


class _Chunks:
    """What both kinds share: from the engine's deltas to LiteLLM's chunks, and the end of the request."""

    def __init__(self, stream: "RequestStream", model: str, plan: CallPlan, llm: "LLM") -> None:
        self._stream = stream
        self._model = model
        self._plan = plan
        self._tokenizer = llm.tokenizer
        self._make_parser = partial(answer_parser, llm, plan, stream.prompt_token_ids)
        self._factory = ChunkFactory(model, response_id(stream.request_id, chat=plan.messages is not None))
        self._choices: dict[int, _Choice] = {}
        self._num_open = plan.report.choices_per_prompt
        self._ready: deque[ModelResponseStream] = deque()
        self._reason: str | None = None  # of a choice that came to no end of its own
        self._ended = False

    def _accept(self, delta: "StreamDelta | None") -> None:
        """Turn one delta into chunks; a text and the reason that came with it become separate chunks. None: the source ended."""
        if delta is None:
            raise no_end(self._reason, self._stream.request_id)
        if delta.finish_reason not in ("stop", "length"):
            self._reason = delta.finish_reason or self._reason
        index = delta.index
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice(self._make_parser())
        if self._plan.report.num_top_logprobs is not None and delta.logprobs:
            choice.logprobs += delta.logprobs
        self._hand_out(index, choice, choice.parser.feed(delta.text))
        if delta.finish_reason not in ("stop", "length"):
            return
        self._hand_out(index, choice, choice.parser.finish(), is_last=True)
        choice.reason = "tool_calls" if choice.parser.num_calls and delta.finish_reason == "stop" else delta.finish_reason
        self._num_open -= 1
        if index:
            self._ready.append(self._factory.end_of_choice(index, choice.reason))
        if not self._num_open:
            self._ready.extend(self._factory.end(self._choices[0].reason or "stop", usage_of([self._stream.output])))
            self._ended = True

    def _hand_out(self, index: int, choice: "_Choice", news: ChatDelta, *, is_last: bool = False) -> None:
        pieces: list[dict[str, Any]] = []
        if news.reasoning:
            pieces.append({"reasoning_content": news.reasoning})
        if news.text:
            pieces.append({"content": news.text})
        for call in news.calls:
            if not self._plan.tools.takes_call(call.index):
                continue
            if call.name is not None:
                choice.call_ids[call.index] = new_call_id()
            pieces.append({"tool_calls": [tool_call(choice.call_ids[call.index], call.index, call.name, call.arguments)]})
        if choice.logprobs and not pieces and is_last:
            pieces.append({"content": ""})
        for piece in pieces:
            told = None
            if choice.logprobs:
                told = chat_logprobs(choice.logprobs, self._plan.report.num_top_logprobs or 0, self._tokenizer)
            choice.logprobs = []
            self._ready.append(self._factory.piece(index, told, **piece))

    def _fail(self, error: Exception) -> Exception:
        """Let go of the request and say what to raise."""
        self.close()
        return litellm_error(error, self._model)

    def close(self) -> None:
        """Abort the request unless it has ended; later ``next`` calls find the stream exhausted."""
        self._ended = True
        self._ready.clear()
        self._stream.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # also half-built, and at interpreter exit
            self.close()


class SyncChunks(_Chunks):
    """The iterator that ``streaming`` returns."""

    def __init__(self, stream: "RequestStream", model: str, plan: CallPlan, llm: "LLM") -> None:
        super().__init__(stream, model, plan, llm)
        self._source = iter(stream)

    def __iter__(self) -> Iterator[ModelResponseStream]:
        return self

    def __next__(self) -> ModelResponseStream:
        while not self._ready:
            if self._ended:
                raise StopIteration
            try:
                self._accept(next(self._source, None))
            except Exception as error:
                raise self._fail(error) from error
            except BaseException:  # KeyboardInterrupt: nobody will read on
                self.close()
                raise
        return self._ready.popleft()


class AsyncChunks(_Chunks):
    """The asynchronous iterator that ``astreaming`` returns; built in one thread, read on the caller's event loop."""

    def __init__(self, stream: "RequestStream", model: str, plan: CallPlan, llm: "LLM") -> None:
        super().__init__(stream, model, plan, llm)
        self._source: AsyncIterator[StreamDelta] | None = None  # made on the reader's loop

    def __aiter__(self) -> AsyncIterator[ModelResponseStream]:
        return self

    async def __anext__(self) -> ModelResponseStream:
        if self._source is None:
            self._source = aiter(self._stream)
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            try:
                self._accept(await anext(self._source, None))
            except Exception as error:
                raise self._fail(error) from error
            except BaseException:  # CancelledError: the task that was reading is gone
                self.close()
                raise
        return self._ready.popleft()

    async def aclose(self) -> None:
        """The same as :meth:`close`, for readers that await it."""
        self.close()
