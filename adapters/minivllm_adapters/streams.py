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
from typing import TYPE_CHECKING

from litellm.types.utils import ModelResponseStream

from minivllm_adapters.errors import litellm_error
from minivllm_adapters.responses import ChunkFactory, no_end, response_id, usage_of

if TYPE_CHECKING:
    from minivllm_plugin.serving.outputs import StreamDelta
    from minivllm_plugin.serving.stream import RequestStream

__all__ = ["AsyncChunks", "SyncChunks"]


class _Chunks:
    """What both kinds share: from the engine's deltas to LiteLLM's chunks, and the end of the request."""

    def __init__(self, stream: "RequestStream", model: str, *, chat: bool) -> None:
        self._stream = stream
        self._model = model
        self._factory = ChunkFactory(model, response_id(stream.request_id, chat=chat))
        self._ready: deque[ModelResponseStream] = deque()
        self._reason: str | None = None  # of the last delta
        self._ended = False

    def _accept(self, delta: "StreamDelta | None") -> None:
        """Turn one delta into chunks; a text and the reason that came with it become separate chunks. None: the source ended."""
        if delta is None:
            raise no_end(self._reason, self._stream.request_id)
        self._reason = delta.finish_reason
        if delta.text:
            self._ready.append(self._factory.text(delta.text))
        if delta.finish_reason in ("stop", "length"):
            self._ready.extend(self._factory.end(delta.finish_reason, usage_of([self._stream.output])))
            self._ended = True

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

    def __init__(self, stream: "RequestStream", model: str, *, chat: bool) -> None:
        super().__init__(stream, model, chat=chat)
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

    def __init__(self, stream: "RequestStream", model: str, *, chat: bool) -> None:
        super().__init__(stream, model, chat=chat)
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
