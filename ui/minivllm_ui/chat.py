"""What happens when somebody sends, retries, edits, undoes, clears or stops: one object for all tabs. Event loop thread.

Handlers are coroutines and asynchronous generators, as Gradio wants them; the conversations live on the server, keyed by the
tab's session. A generator is closed with the tab it works for, and closing it aborts the request.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from typing import Any, NamedTuple

import gradio as gr

from minivllm_ui.answering import Answering, Sampling
from minivllm_ui.conversation import Conversation, Conversations, Turn
from minivllm_ui.display import shown_messages, without_fence
from minivllm_ui.engine_host import EngineHost
from minivllm_ui.recorder import Recorder

__all__ = ["Chat"]

LAST_WORD = 3.0  # seconds that an answer has to end before the next begins

Update = tuple[Any, Any, Any]
"""Messages, message box, whose blocks are marked on the panel."""


class Chat:
    """What the widgets' events do. One for all tabs. Gradio gives ``event`` and ``request`` by their types; ``settings`` are the
    values of the widgets that :func:`_settings` names."""

    def __init__(self, host: EngineHost, recorder: Recorder, conversations: Conversations) -> None:
        self._host = host
        self._recorder = recorder
        self._conversations = conversations

    async def send(self, request: gr.Request, text: str, *settings: Any) -> AsyncGenerator[Update, None]:
        conversation = self._of(request)
        if conversation.running is not None and conversation.running.is_stopping:  # stop, clear: then send at once
            await self._stop(conversation)
        if not text.strip() or conversation.running is not None:
            yield gr.skip(), gr.skip(), gr.skip()
            return
        conversation.turns.append(Turn(text))
        async with contextlib.aclosing(self._answer(conversation, _settings(*settings))) as updates:
            async for update in updates:
                yield update

    async def retry(self, event: gr.RetryData, request: gr.Request, *settings: Any) -> AsyncGenerator[Update, None]:
        again = self._again(self._of(request), event.index, None, _settings(*settings))
        async with contextlib.aclosing(again) as updates:
            async for update in updates:
                yield update

    async def edit(self, event: gr.EditData, request: gr.Request, *settings: Any) -> AsyncGenerator[Update, None]:
        text = without_fence(event.value if isinstance(event.value, str) else event.value[0]["text"])
        again = self._again(self._of(request), event.index, text, _settings(*settings))
        async with contextlib.aclosing(again) as updates:
            async for update in updates:
                yield update

    async def undo(self, event: gr.UndoData, request: gr.Request) -> tuple[Any, Any]:
        conversation = self._of(request)
        turn = await self._drop(conversation, event.index)
        return shown_messages(conversation.turns)[0], gr.skip() if turn is None else turn.question

    async def clear(self, request: gr.Request) -> list[Any]:
        conversation = self._of(request)
        conversation.turns.clear()
        await self._stop(conversation)
        return []

    async def stop(self, request: gr.Request) -> None:
        running = self._of(request).running
        if running is not None:
            running.stop()

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _of(self, request: gr.Request) -> Conversation:
        return self._conversations.of(str(request.session_hash))

    async def _again(
        self, conversation: Conversation, index: Any, text: str | None, settings: "_Settings"
    ) -> AsyncGenerator[Update, None]:
        turn = await self._drop(conversation, index)
        if turn is None or conversation.running is not None:
            yield shown_messages(conversation.turns)[0], gr.skip(), gr.skip()
            return
        conversation.turns.append(Turn(turn.question if text is None else text))
        async with contextlib.aclosing(self._answer(conversation, settings)) as updates:
            async for update in updates:
                yield update

    async def _answer(self, conversation: Conversation, settings: "_Settings") -> AsyncGenerator[Update, None]:
        """Answer the last turn; the first update empties the box and tells the panel who we are."""
        answering = Answering(
            self._host,
            self._recorder,
            conversation.next_request_id(),
            conversation.messages(settings.system),
            conversation.turns[-1],
            settings.sampling,
        )
        conversation.running = answering
        try:
            yield shown_messages(conversation.turns)[0], gr.Textbox("", submit_btn=False, stop_btn=True), conversation.name
            async with contextlib.aclosing(answering.updates()) as updates:
                async for _ in updates:
                    yield shown_messages(conversation.turns)[0], gr.skip(), gr.skip()
        finally:
            conversation.running = None
        yield shown_messages(conversation.turns)[0], gr.Textbox(submit_btn=True, stop_btn=False), gr.skip()

    async def _drop(self, conversation: Conversation, index: Any) -> Turn | None:
        """Forget the turn that message ``index`` belongs to, and what followed; an answer that is being made ends first."""
        await self._stop(conversation)
        owners = shown_messages(conversation.turns)[1]
        place = index[0] if isinstance(index, list | tuple) else index
        return conversation.drop_from(owners[place]) if 0 <= place < len(owners) else None

    async def _stop(self, conversation: Conversation) -> None:
        if conversation.running is not None:
            conversation.running.stop()
        give_up = time.monotonic() + LAST_WORD
        while conversation.running is not None and time.monotonic() < give_up:
            await asyncio.sleep(0.02)


class _Settings(NamedTuple):
    system: str
    sampling: Sampling


def _settings(system: str, max_tokens: float, temperature: float, top_p: float, top_k: float, seed: str) -> _Settings:
    """The page's widgets, in the order in which the events name them."""
    number = int(seed) if seed.strip().isdecimal() else None
    return _Settings(system, Sampling(int(max_tokens), float(temperature), float(top_p), int(top_k), number))
