"""One request as its consumer sees it: iterate, async-iterate, wait for the result, leave early.

Detokenising and stop strings happen here, on the consumer's side, so a slow or failing consumer cannot hold up the engine.
A stop string ends the request at the token that completes it, however far the engine has run ahead meanwhile.

Leaving in any way (close, break, cancelled task, dropped reference, deadline) aborts the request: one put into the
engine's inbox, without waiting.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Generator
from types import TracebackType
from typing import Any, Self

from minivllm_plugin.engine.sequence import FinishReason
from minivllm_plugin.errors import (
    InvalidRequestError,
    MinivllmError,
    RequestAbortedError,
    RequestFailedError,
    RequestTimeoutError,
)
from minivllm_plugin.serving.detokenizer import Detokenizer
from minivllm_plugin.serving.outbox import Ended, Failed, Item, Outbox
from minivllm_plugin.serving.outputs import CompletionOutput, RequestOutput, StreamDelta

__all__ = ["RequestStream", "deadline_after"]


class RequestStream:
    """The handle of one submitted request. One consumer at a time, a thread or a coroutine; it keeps its LLM open.

    Iterating yields :class:`StreamDelta`; the last one carries ``finish_reason``. An aborted request ends with reason
    ``abort``; a failed one raises.

    Raises (from iteration, :meth:`result` and :meth:`aresult`):
        RequestTimeoutError: the deadline passed.
        RequestFailedError: this request failed.
        EngineDeadError, EngineClosedError: the engine went away.
        InvalidRequestError: another thread or task is reading; its stream goes on.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: list[int],
        detokenizer: Detokenizer,
        outbox: Outbox,
        deadline: float | None,
        has_stop_strings: bool,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.prompt_token_ids = prompt_token_ids
        self._detokenizer = detokenizer
        self._outbox = outbox
        self._abort: Callable[[], None] = _not_queued
        self._deadline = deadline
        self._has_stop_strings = has_stop_strings
        self._token_ids: list[int] = []
        self._finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._error: Exception | None = None

    def arm(self, abort: Callable[[], None]) -> None:
        """From now on leaving aborts: the request is queued."""
        self._abort = abort

    # --- state ---------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """True once the end has been read, whatever it was."""
        return self._finish_reason is not None or self._error is not None

    @property
    def output(self) -> RequestOutput:
        """What has been read so far."""
        completion = CompletionOutput(
            index=0,
            text=self._detokenizer.text,
            token_ids=list(self._token_ids),
            finish_reason=self._finish_reason,
            stop_reason=self._stop_reason,
        )
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=self._finish_reason is not None,
            num_cached_tokens=self._outbox.num_cached_tokens,
            metrics=self._outbox.metrics,
        )

    # --- a thread reads --------------------------------------------------------------------------------------------

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> StreamDelta:
        while not self.finished:
            try:
                delta = self._digest(self._outbox.take() or self._outbox.wait(self._remaining()))
            except InvalidRequestError:  # somebody else reads, and goes on
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
                self._digest(self._outbox.wait(self._remaining(), for_end=not self._has_stop_strings))
        except InvalidRequestError:  # somebody else reads, and goes on
            raise
        except BaseException:
            self.close()
            raise
        return self._result()

    def close(self) -> None:
        """Abort if it has not ended. Never blocks; harmless when repeated, from any thread."""
        if not self.finished:
            self._finish_reason = "abort"
            self._abort()

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
            async with asyncio.timeout(self._remaining()):
                return await self._outbox.wait_async(for_end=for_end)
        except TimeoutError:
            return []  # _digest says what that means
        except InvalidRequestError:  # somebody else reads, and goes on
            raise
        except BaseException:  # CancelledError above all
            self.close()
            raise

    def _digest(self, items: list[Item]) -> StreamDelta | None:
        """Turn what the engine sent into one delta; None when it was nothing yet."""
        if not items and self._deadline is not None and time.monotonic() >= self._deadline:
            self.close()
            raise self._fail(RequestTimeoutError(f"request {self.request_id!r} did not end before its deadline and was aborted"))
        tokens: list[int] = []
        ended: Ended | None = None
        for item in items:
            if isinstance(item, Failed):
                if not tokens:
                    raise self._fail(item.error)
                self._outbox.put_back(item)  # what came before it is delivered first
                break
            progress = item.progress if isinstance(item, Ended) else item
            if progress.token_id is not None:
                tokens.append(progress.token_id)
            if isinstance(item, Ended):
                ended = item
        if not tokens and ended is None:
            return None
        try:
            return self._advance(tokens, ended)
        except MinivllmError:
            raise
        except Exception as error:  # a broken tokenizer must not leave the request running
            self.close()
            raise self._fail(
                RequestFailedError(f"request {self.request_id!r} failed while its text was made: {error!r}")
            ) from error

    def _advance(self, tokens: list[int], ended: Ended | None) -> StreamDelta:
        before = len(self._token_ids)
        closing = _closing_token(tokens, ended)
        fed = self._detokenizer.feed(tokens[:-1] if closing is not None else tokens)
        text = fed.text
        if fed.stop_reason is not None:
            self._token_ids += tokens[: fed.num_tokens]
            self._stop_reason = fed.stop_reason
            self._finish_reason = "stop"
            if ended is None:
                self._abort()
        else:
            self._token_ids += tokens
            if ended is not None:
                self._finish_reason, self._stop_reason = ended.progress.finish_reason, ended.progress.stop_reason
                text += self._detokenizer.finish(ended.progress.finish_reason or "stop", closing).text
        return StreamDelta(text, tuple(self._token_ids[before:]), self._finish_reason, self._stop_reason)

    def _result(self) -> RequestOutput:
        if self._error is not None:
            raise self._error
        if self._finish_reason == "abort":
            raise RequestAbortedError(
                f"request {self.request_id!r} was aborted after {len(self._token_ids)} tokens; stream.output holds them"
            )
        return self.output

    def _fail(self, error: Exception) -> Exception:
        self._error = error
        return error

    def _remaining(self) -> float | None:
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def _shorten_deadline(self, timeout: float) -> None:
        wanted = deadline_after(timeout)
        known = [deadline for deadline in (self._deadline, wanted) if deadline is not None]
        self._deadline = min(known, default=None)


def deadline_after(timeout: float) -> float | None:
    """The moment ``timeout`` seconds from now on ``time.monotonic()``'s clock; None when no clock reaches that far.

    Raises:
        InvalidRequestError: not a number, or NaN.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or (isinstance(timeout, float) and math.isnan(timeout)):
        raise InvalidRequestError(f"timeout must be a number of seconds or None, got {timeout!r}")
    # The standard library's waits take no more than this; infinity, too, means no limit.
    return None if timeout > threading.TIMEOUT_MAX else time.monotonic() + timeout


def _not_queued() -> None:
    """There is nothing to abort yet."""


def _closing_token(tokens: list[int], ended: Ended | None) -> int | None:
    """The token that ended the request (end or stop token): it is in ``token_ids``, but not in the text."""
    if ended is None or ended.progress.finish_reason != "stop" or ended.progress.token_id is None:
        return None
    if isinstance(ended.progress.stop_reason, str):  # a stop criterion's word: its token is part of the answer
        return None
    return tokens[-1]
