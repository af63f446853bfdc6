"""One text on its way to becoming a vector: wait for it in a thread or a coroutine, or leave, which aborts it."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from minivllm_plugin.errors import EngineError, InvalidRequestError, RequestAbortedError, RequestTimeoutError
from minivllm_plugin.serving.deadlines import is_past, seconds_left
from minivllm_plugin.serving.outbox import Ended, Failed, Item, Outbox

__all__ = ["EmbeddingOutput", "EmbeddingRequest", "shortened"]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of one text, of Euclidean length 1.

    Attributes:
        num_cached_tokens: of its tokens, found in the prefix cache.
    """

    request_id: str
    prompt_token_ids: list[int]
    embedding: list[float]
    num_cached_tokens: int = 0


class EmbeddingRequest:
    """The handle of one text. Dropping it, cancelling its task or :meth:`close` aborts the request.

    Raises (from :meth:`result` and :meth:`aresult`): as :class:`~minivllm_plugin.serving.stream.RequestStream`.
    """

    def __init__(
        self, *, request_id: str, prompt_token_ids: list[int], outbox: Outbox, deadline: float | None, dimensions: int | None
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self._outbox = outbox
        self._deadline = deadline
        if dimensions is not None and (isinstance(dimensions, bool) or not isinstance(dimensions, int) or dimensions < 1):
            raise InvalidRequestError(f"dimensions={dimensions!r} must be an integer of at least 1, or None for all of them")
        self._dimensions = dimensions
        self._abort: Callable[[], None] = _nothing
        self._output: EmbeddingOutput | None = None
        self._error: Exception | None = None

    def arm(self, abort: Callable[[], None]) -> None:
        """From now on leaving aborts: the request is queued."""
        self._abort = abort

    def result(self) -> EmbeddingOutput:
        """Wait for the vector."""
        try:
            while self._output is None:
                self._raise_if_over()
                self._digest(self._outbox.wait(seconds_left(self._deadline), for_end=True))
        except InvalidRequestError:  # somebody else waits, and goes on; or it has ended
            raise
        except EngineError:  # nobody is left to abort it, or it is not for this thread to wait
            raise
        except BaseException:
            self.close()
            raise
        return self._output

    async def aresult(self) -> EmbeddingOutput:
        """The same for a coroutine; cancelling it aborts the request."""
        try:
            while self._output is None:
                self._raise_if_over()
                try:
                    async with asyncio.timeout(seconds_left(self._deadline)):
                        items = await self._outbox.wait_async(for_end=True)
                except TimeoutError:
                    items = []
                self._digest(items)
        except InvalidRequestError:
            raise
        except EngineError:  # nobody is left to abort it, or it is not for this thread to wait
            raise
        except BaseException:
            self.close()
            raise
        return self._output

    def close(self) -> None:
        """Abort it if it has not ended. Never blocks; harmless when repeated, from any thread."""
        if self._output is None and self._error is None:
            self._error = RequestAbortedError(f"request {self.request_id!r} was aborted before its embedding was computed")
            self._abort()

    def __del__(self) -> None:
        if hasattr(self, "_error"):  # else the constructor did not get to its end
            self.close()

    def _raise_if_over(self) -> None:
        """Nothing more is put into the outbox of a request that is over; waiting for it would never end."""
        if self._error is not None:
            raise self._error

    def _digest(self, items: list[Item]) -> None:
        self._raise_if_over()
        if not items and is_past(self._deadline):
            self.close()
            self._error = RequestTimeoutError(f"request {self.request_id!r} did not end before its deadline and was aborted")
            raise self._error
        for item in items:
            if isinstance(item, Failed):
                self._error = item.error
                raise item.error
            if isinstance(item, Ended):
                if item.progress.embedding is None:  # somebody aborted it by its id
                    self.close()
                    assert self._error is not None
                    raise self._error
                try:
                    vector = shortened(item.progress.embedding, self._dimensions)
                except InvalidRequestError as error:
                    self._error = error
                    raise
                cached = self._outbox.num_cached_tokens
                self._output = EmbeddingOutput(self.request_id, self.prompt_token_ids, vector, cached)


def shortened(vector: list[float], dimensions: int | None) -> list[float]:
    """The first ``dimensions`` values, brought to length 1 again (Matryoshka embeddings); all of them for None.

    Raises:
        InvalidRequestError: the model has fewer, or none are asked for.
    """
    if dimensions is None:
        return vector
    if isinstance(dimensions, bool) or not isinstance(dimensions, int) or not 1 <= dimensions <= len(vector):
        raise InvalidRequestError(f"dimensions={dimensions!r} must be between 1 and the model's {len(vector)}")
    part = vector[:dimensions]
    length = math.sqrt(sum(value * value for value in part))
    return [value / length for value in part] if length else part


def _nothing() -> None:
    """There is nothing to abort yet."""
