"""One request as its consumer sees it: iterate, async-iterate, wait for the result, leave early.

Detokenising and stop strings happen here, on the consumer's side, so a slow or failing consumer cannot hold up the engine.
A stop string ends the request at the token that completes it, however far the engine has run ahead meanwhile.

Leaving in any way (close, break, cancelled task, dropped reference, deadline) aborts the request: one put into the
engine's inbox, without waiting.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Self

from minivllm_plugin.engine.llm_engine import RequestProgress
from minivllm_plugin.engine.logprobs import TokenLogprobs
from minivllm_plugin.errors import (
    EngineError,
    InvalidRequestError,
    MinivllmError,
    RequestAbortedError,
    RequestFailedError,
    RequestTimeoutError,
)
from minivllm_plugin.serving.choices import Choice
from minivllm_plugin.serving.deadlines import deadline_after, is_past, seconds_left
from minivllm_plugin.serving.live_requests import choice_id
from minivllm_plugin.serving.logprobs import prompt_mappings
from minivllm_plugin.serving.outbox import Ended, Failed, Item, Outbox
from minivllm_plugin.serving.outputs import RequestOutput, StreamDelta
from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["RequestStream"]


class RequestStream:
    """The handle of one submitted request. One consumer at a time, a thread or a coroutine; it keeps its LLM open.

    Iterating yields :class:`StreamDelta`; the last one of each completion carries ``finish_reason``. An aborted request ends
    with reason ``abort``; a failed one raises.

    Raises (from iteration, :meth:`result` and :meth:`aresult`):
        RequestTimeoutError: the deadline passed.
        RequestFailedError: this request failed.
        EngineDeadError, EngineClosedError: the engine went away.
        EngineError: an engine's own thread, in a hook, would wait for itself; the request goes on.
        InvalidRequestError: another thread or task is reading; its stream goes on.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        choices: list[Choice],
        outbox: Outbox,
        deadline: float | None,
        has_stop_strings: bool,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self._choices = {choice_id(request_id, choice.index): choice for choice in choices}
        self._tokenizer = tokenizer
        self._outbox = outbox
        self._abort: Callable[[int | None], None] = _not_queued
        self._deadline = deadline
        self._has_stop_strings = has_stop_strings
        self._prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
        self._unread: deque[StreamDelta] = deque()
        self._is_closed = False
        self._error: Exception | None = None

    def arm(self, abort: Callable[[int | None], None]) -> None:
        """From now on leaving aborts: the request is queued. ``abort(i)`` ends completion i, ``abort(None)`` all."""
        self._abort = abort

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True once the end has been read, whatever it was."""
        return self._is_closed or self._error is not None or self._all_ended

    @property
    def _all_ended(self) -> bool:
        return all(choice.is_finished for choice in self._choices.values())

    @property
    def output(self) -> RequestOutput:
        """What has been read so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[choice.output for choice in self._choices.values()],
            finished=self._all_ended,
            num_cached_tokens=self._outbox.num_cached_tokens,
            metrics=self._outbox.metrics,
            prompt_logprobs=prompt_mappings(self._prompt_logprobs, self._tokenizer),
        )

    # --- a thread reads --------------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamDelta:
        if self._unread:
            return self._unread.popleft()
        while not self.finished:
            try:
                delta = self._digest(self._outbox.take() or self._outbox.wait(seconds_left(self._deadline)))
            except (InvalidRequestError, EngineError):  # somebody else reads, and goes on; or it is not for this thread to wait
                raise
            except BaseException:  # KeyboardInterrupt while waiting, too
                self.close()
                raise
            if delta is not None:
                return delta
        raise StopIteration

    def result(self, timeout: float | None = None) -> RequestOutput:
        """Read to the end.

        Args:
            timeout: seconds from now; when they pass the request is aborted.

        Raises:
            RequestAbortedError: it was aborted, by :meth:`close` or by id, before it ended.
        """
        if timeout is not None:
            self._shorten_deadline(timeout)
        try:
            while not self.finished:
                self._digest(self._outbox.wait(seconds_left(self._deadline), for_end=not self._has_stop_strings))
        except (InvalidRequestError, EngineError):
            raise
        except BaseException:
            self.close()
            raise
        return self._result()

    def close(self) -> None:
        """Abort if it has not ended. Never blocks; harmless when repeated, from any thread."""
        if not self.finished:
            self._is_closed = True
            self._unread.clear()
            for choice in self._choices.values():
                if not choice.is_finished:
                    choice.finish_reason = "abort"
            self._abort(None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_error"):  # else the constructor did not get to its end
            self.close()

    # --- a coroutine reads -----------------------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StreamDelta:
        if self._unread:
            return self._unread.popleft()
        while not self.finished:
            delta = self._digest(self._outbox.take() or await self._wait_async(for_end=False))
            if delta is not None:
                return delta
        raise StopAsyncIteration

    async def aresult(self, timeout: float | None = None) -> RequestOutput:
        """:meth:`result` for a coroutine; cancelling it aborts the request."""
        if timeout is not None:
            self._shorten_deadline(timeout)
        while not self.finished:
            self._digest(await self._wait_async(for_end=not self._has_stop_strings))
        return self._result()

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        """``await stream`` is ``await stream.aresult()``."""
        return self.aresult().__await__()

    async def aclose(self) -> None:
        """:meth:`close`, for ``async with`` and generators."""
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # --- helpers ---------------------------------------------------------------------------------------------------

    async def _wait_async(self, *, for_end: bool) -> list[Item]:
        try:
            async with asyncio.timeout(seconds_left(self._deadline)):
                return await self._outbox.wait_async(for_end=for_end)
        except TimeoutError:
            return []  # _digest says what that means
        except (InvalidRequestError, EngineError):
            raise
        except BaseException:  # CancelledError above all
            self.close()
            raise

    def _digest(self, items: list[Item]) -> StreamDelta | None:
        """Turn what the engine sent into one delta; None when it was nothing yet."""
        if not items and is_past(self._deadline):
            self.close()
            raise self._fail(RequestTimeoutError(f"request {self.request_id!r} did not end before its deadline and was aborted"))
        arrived: dict[str, list[RequestProgress]] = {}
        for item in items:
            if isinstance(item, Failed):
                if not arrived:
                    raise self._fail(item.error)
                self._outbox.put_back(item)  # what came before it is delivered first
                break
            progress = item.progress if isinstance(item, Ended) else item
            if progress.prompt_logprobs is not None:
                self._prompt_logprobs = progress.prompt_logprobs
            if not self._choices[progress.request_id].is_finished:  # else the engine had run ahead of a stop string
                arrived.setdefault(progress.request_id, []).append(progress)
        if not arrived:
            return None
        try:
            deltas = [self._advance(self._choices[identity], news) for identity, news in arrived.items()]
        except MinivllmError:
            raise
        except Exception as error:  # a broken tokenizer must not leave the request running
            self.close()
            raise self._fail(
                RequestFailedError(f"request {self.request_id!r} failed while its text was made: {error!r}")
            ) from error
        self._unread.extend(deltas[1:])
        return deltas[0]

    def _advance(self, choice: Choice, news: list[RequestProgress]) -> StreamDelta:
        delta, stopped_here = choice.advance(news)
        if stopped_here:
            self._abort(choice.index)
        return delta

    def _result(self) -> RequestOutput:
        if self._error is not None:
            raise self._error
        if any(choice.finish_reason == "abort" for choice in self._choices.values()):
            tokens = sum(choice.num_tokens for choice in self._choices.values())
            raise RequestAbortedError(f"request {self.request_id!r} was aborted after {tokens} tokens; stream.output holds them")
        return self.output

    def _fail(self, error: Exception) -> Exception:
        self._error = error
        return error

    def _shorten_deadline(self, timeout: float) -> None:
        wanted = deadline_after(timeout)
        known = [deadline for deadline in (self._deadline, wanted) if deadline is not None]
        self._deadline = min(known, default=None)


def _not_queued(choice: int | None) -> None:
    """There is nothing to abort yet."""
