"""One answer of the model, asked for through ``litellm.acompletion``: the public door, nothing else. Event loop thread.

Knows no Gradio. Whoever iterates :meth:`Answering.updates` hears of every change, at most ten times a second, and at least four
times a second while nothing happens: that is what makes a tab that was closed while its request waits visible. Leaving the
iteration in any way aborts the request.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

import litellm

import minivllm_plugin
from minivllm_plugin.errors import MinivllmError
from minivllm_plugin.events import RequestOutcome
from minivllm_ui.conversation import Message, Turn
from minivllm_ui.engine_host import EngineHost
from minivllm_ui.recorder import Recorder

__all__ = ["AnswerStats", "Answering", "Sampling"]

PULSE = 0.1  # seconds between looks
PATIENCE = 2  # pulses without a change after which one is told all the same
LAST_WORD = 1.0  # seconds in which the engine says how an aborted request ended


@dataclass(frozen=True, slots=True)
class Sampling:
    """What the page's controls say. ``seed`` None draws one."""

    max_tokens: int = 512
    temperature: float = 0.7
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class AnswerStats:
    """One answer in numbers. Tokens, seconds; None for a stage that was not reached.

    Attributes:
        first_token_seconds: from queued to the first token.
        tokens_per_second: (tokens - 1) / seconds from the first token to the end.
        context: prompt and completion.
    """

    request_id: str
    num_prompt: int
    num_cached: int
    num_generated: int
    queue_seconds: float | None
    prefill_seconds: float | None
    decode_seconds: float | None
    num_preemptions: int
    num_blocks: int
    max_context: int
    reason: str

    @property
    def context(self) -> int:
        return self.num_prompt + self.num_generated

    @property
    def first_token_seconds(self) -> float | None:
        return None if self.queue_seconds is None or self.prefill_seconds is None else self.queue_seconds + self.prefill_seconds

    @property
    def tokens_per_second(self) -> float | None:
        if self.num_generated < 2 or not self.decode_seconds:
            return None
        return (self.num_generated - 1) / self.decode_seconds


class Answering:
    """Fills ``turn`` with the model's answer to ``messages``. Iterate :meth:`updates` once.

    Attributes:
        is_stopping: :meth:`stop` was called; it ends as soon as the engine has said so.
    """

    def __init__(
        self, host: EngineHost, recorder: Recorder, request_id: str, messages: list[Message], turn: Turn, sampling: Sampling
    ) -> None:
        self.request_id = request_id
        self.turn = turn
        self._host = host
        self._recorder = recorder
        self._messages = messages
        self._sampling = sampling
        self._reader: asyncio.Task[None] | None = None
        self._usage: Any = None
        self._reason = ""
        self.is_stopping = False

    def stop(self) -> None:
        """End it now: the engine lets go of its blocks before its next step."""
        self.is_stopping = True
        self._leave()

    async def updates(self) -> AsyncGenerator[None, None]:
        """One item a change of the turn."""
        turn, began = self.turn, time.monotonic()
        self._reader = asyncio.create_task(self._read(), name=f"minivllm-ui-{self.request_id}")
        quiet = 0
        try:
            while not self._reader.done():
                before = (turn.answer, turn.progress)
                await asyncio.wait([self._reader], timeout=PULSE)
                turn.progress = self._describe(time.monotonic() - began)
                quiet = 0 if before != (turn.answer, turn.progress) else quiet + 1
                if not quiet or quiet >= PATIENCE:
                    quiet = 0
                    yield
            self._conclude()
            turn.stats = await self._stats()
            yield
        finally:
            if turn.status == "running":  # left by our reader: the tab is gone
                turn.status = "stopped"
            self._leave()

    # --- helpers ---------------------------------------------------------------------------------------------------

    async def _read(self) -> None:
        host = self._host
        while host.is_restarting:
            await asyncio.sleep(PULSE)
        minivllm_plugin.register()  # LiteLLM's list of providers may have been re-assigned by somebody in this process
        room = host.max_model_len - await asyncio.to_thread(host.count_tokens, self._messages)
        stream: Any = await litellm.acompletion(
            model=host.litellm_model,
            messages=self._messages,
            stream=True,
            stream_options={"include_usage": True},
            request_id=self.request_id,
            max_tokens=max(1, min(self._sampling.max_tokens, room)),  # a full window is the provider's to refuse
            temperature=self._sampling.temperature,
            top_p=self._sampling.top_p,
            top_k=self._sampling.top_k,
            **({} if self._sampling.seed is None else {"seed": self._sampling.seed}),
        )
        try:
            async for chunk in stream:
                self._usage = getattr(chunk, "usage", None) or self._usage
                if chunk.choices:
                    self.turn.answer += chunk.choices[0].delta.content or ""
                    self._reason = chunk.choices[0].finish_reason or self._reason
        finally:
            await stream.aclose()

    def _leave(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.cancel()
            self._host.abort(self.request_id)

    def _conclude(self) -> None:
        assert self._reader is not None
        turn = self.turn
        turn.progress = ""
        if self.is_stopping or self._reader.cancelled():
            turn.status = "stopped"
        elif (error := self._reader.exception()) is not None:
            turn.status, turn.error = "failed", _in_words(error)
        else:
            turn.status = "done"

    def _describe(self, seconds: float) -> str:
        if self._host.is_restarting:
            return "the engine is starting …"
        one, ahead = self._recorder.progress(self.request_id)
        clock = f"{seconds:.0f} s"
        if one is None:
            return f"sending · {clock}"
        if one.state == "preempted":
            return f"pushed out of the full pool, waiting to go on · {one.num_generated} tokens so far · {clock}"
        if one.state == "waiting":
            return f"waiting, {ahead} ahead · {clock}" if ahead else f"waiting · {clock}"
        if one.first_token_time is None:
            return f"reading the prompt, {min(one.num_computed, one.num_prompt)} of {one.num_prompt} tokens · {clock}"
        elapsed = self._recorder.now - one.first_token_time
        rate = f"{(one.num_generated - 1) / elapsed:.1f} tok/s" if one.num_generated > 1 and elapsed > 0 else "– tok/s"
        return f"{rate} · {one.num_generated} tokens · {clock}"

    async def _stats(self) -> AnswerStats | None:
        """The engine's own account. An aborted request is accounted for when the engine takes the abort in."""
        give_up = time.monotonic() + LAST_WORD
        outcome, block_size = self._recorder.outcome(self.request_id)
        while outcome is None and time.monotonic() < give_up and self.turn.status != "failed":
            await asyncio.sleep(PULSE / 4)
            outcome, block_size = self._recorder.outcome(self.request_id)
        return None if outcome is None else self._account(outcome, block_size)

    def _account(self, outcome: RequestOutcome, block_size: int) -> AnswerStats:
        usage = self._usage
        details = getattr(usage, "prompt_tokens_details", None)
        num_prompt = usage.prompt_tokens if usage is not None else outcome.num_prompt_tokens
        num_generated = usage.completion_tokens if usage is not None else outcome.num_completion_tokens
        return AnswerStats(
            request_id=self.request_id,
            num_prompt=num_prompt,
            num_cached=details.cached_tokens if details is not None else outcome.num_cached_tokens,
            num_generated=num_generated,
            queue_seconds=outcome.queue_seconds,
            prefill_seconds=outcome.prefill_seconds,
            decode_seconds=outcome.decode_seconds,
            num_preemptions=outcome.num_preemptions,
            num_blocks=-(-(num_prompt + num_generated) // max(block_size, 1)),
            max_context=self._host.max_model_len,
            reason=self._reason or {"abort": "stopped"}.get(outcome.reason, outcome.reason),
        )


def _in_words(error: BaseException) -> str:
    """The engine's own message, without what LiteLLM put around it."""
    with contextlib.suppress(AttributeError):
        error = error.original_exception or error  # type: ignore[attr-defined]  # only MidStreamFallbackError has it
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MinivllmError):
            return str(seen)
        seen = seen.__cause__
    return str(error) or type(error).__name__
