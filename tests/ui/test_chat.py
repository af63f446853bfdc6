"""The chat's handlers without a browser: leaving early, errors, users side by side. (Kinds: H01, H02, H05.)"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from minivllm_ui.chat import Chat
from minivllm_ui.conversation import Conversations
from minivllm_ui.engine_host import EngineHost
from minivllm_ui.loops import in_event_loop
from minivllm_ui.observer import EngineObserver
from minivllm_ui.page import build_page
from minivllm_ui.recorder import Recorder

SAMPLING = (4096, 0.0, 1.0, 0, "7")
SYSTEM = "Be kind."
PATIENCE = 20.0


class Desk:
    """An engine host, its recorder and the handlers, without a server."""

    def __init__(self, **options: Any) -> None:
        observer = EngineObserver()
        self.host = EngineHost("scripted", {"num_blocks": 256, **options}, "fcfs", observer)
        self.recorder = Recorder(observer, dict)
        self.conversations = Conversations()
        self.chat = Chat(self.host, self.recorder, self.conversations)

    def close(self) -> None:
        self.recorder.close()
        self.host.close()

    def send(self, text: str, session: str = "s") -> AsyncGenerator[Any, None]:
        return self.chat.send(_request(session), text, SYSTEM, *SAMPLING)

    @property
    def header(self) -> dict[str, Any]:
        from minivllm_ui.frames import decode

        data = self.recorder.frame()
        assert data is not None
        return dict(decode(data).header)

    async def until(self, condition: Callable[[dict[str, Any]], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition(self.header):
                await asyncio.sleep(0.01)

    async def until_idle(self) -> None:
        await self.until(lambda h: h["held"] == h["shared"] == h["running"] == h["waiting"] == 0)


def _request(session: str) -> Any:
    return SimpleNamespace(session_hash=session)


def _run(story: Callable[[Desk], Coroutine[Any, Any, None]], **options: Any) -> None:
    desk = Desk(**options)
    try:
        asyncio.run(story(desk))
    finally:
        desk.close()


async def _all(updates: AsyncGenerator[Any, None]) -> list[Any]:
    return [update async for update in updates]


def _texts(update: Any) -> list[str]:
    return [one["content"][0]["text"] for one in update[0]]


async def _until_text(updates: AsyncGenerator[Any, None], part: str) -> None:
    async for update in updates:
        if any(part in text for text in _texts(update)):
            return
    raise AssertionError(f"{part!r} never came")


def test_closing_the_generator_frees_the_blocks_and_keeps_the_part(model: Any) -> None:
    async def story(desk: Desk) -> None:
        updates = desk.send("a story")
        await _until_text(updates, "Once upon")
        await updates.aclose()
        await desk.until_idle()
        [turn] = desk.conversations.of("s").turns
        assert turn.status == "stopped"
        assert turn.answer.startswith("Once upon")
        final = (await _all(desk.send("hello")))[-1]
        assert "Hello there." in _texts(final)

    _run(story)


@pytest.mark.parametrize("how", ["cancel", "throw"])
def test_a_cancelled_task_frees_the_blocks(model: Any, how: str) -> None:
    async def story(desk: Desk) -> None:
        updates = desk.send("a story")
        await _until_text(updates, "Once upon")
        if how == "throw":
            with pytest.raises(GeneratorExit):
                await updates.athrow(GeneratorExit)
        else:
            task = asyncio.create_task(_all(updates))
            await asyncio.sleep(0.05)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await desk.until_idle()
        assert desk.conversations.of("s").running is None

    _run(story)


def test_a_closed_tab_is_noticed_while_its_request_waits(model: Any) -> None:
    async def story(desk: Desk) -> None:
        running = desk.send("a story", "one")
        await _until_text(running, "Once upon")
        waiting = desk.send("a story", "two")
        for _ in range(4):  # what comes while nothing happens, so that Gradio sees that nobody reads
            await anext(waiting)
        await desk.until(lambda h: h["waiting"] == 1)
        assert desk.conversations.of("two").turns[0].progress.startswith("waiting")
        await waiting.aclose()
        await desk.until(lambda h: h["waiting"] == 0 and h["running"] == 1)
        await running.aclose()
        await desk.until_idle()

    _run(story, max_num_sequences=1)


def test_two_users_are_answered_in_the_same_batches_and_stay_apart(model: Any) -> None:
    async def story(desk: Desk) -> None:
        one, two = desk.send("a story of mine", "one"), desk.send("a story of theirs", "two")
        await _until_text(one, "Once upon")  # what is not computed yet cannot be shared
        await _until_text(two, "Once upon")
        await desk.until(lambda h: h["running"] == 2 and h["shared"] > 0)
        assert [turn.question for turn in desk.conversations.of("one").turns] == ["a story of mine"]
        assert [turn.question for turn in desk.conversations.of("two").turns] == ["a story of theirs"]
        await one.aclose()
        await two.aclose()

    _run(story)


def test_sixteen_users_on_one_engine_are_all_answered(model: Any) -> None:
    async def story(desk: Desk) -> None:
        finals = await asyncio.gather(*(_all(desk.send(f"hello {number}", f"user {number}")) for number in range(16)))
        for number, updates in enumerate(finals):
            texts = _texts(updates[-1])
            assert texts[:2] == [f"hello {number}", "Hello there."]
        assert desk.header["finished"] == 16
        assert desk.header["hit_rate"] > 0

    _run(story)


def test_an_empty_answer_an_empty_question_and_a_second_question_meanwhile(model: Any) -> None:
    async def story(desk: Desk) -> None:
        assert len(await _all(desk.send("   "))) == 1
        assert desk.conversations.of("s").turns == []
        final = (await _all(desk.send("nothing")))[-1]
        assert "_(an empty answer)_" in _texts(final)
        updates = desk.send("a story")
        await _until_text(updates, "Once upon")
        assert len(await _all(desk.send("hello"))) == 1  # refused: one at a time
        assert len(desk.conversations.of("s").turns) == 2
        await updates.aclose()

    _run(story)


def test_a_dead_engine_fails_the_answer_keeps_the_part_and_is_replaced(model: Any) -> None:
    async def story(desk: Desk) -> None:
        model.answers["briefly"] = "A start"
        final = (await _all(desk.send("please die")))[-1]
        assert "the scripted model was told to die" in " ".join(_texts(final))
        assert desk.conversations.of("s").turns[0].status == "failed"
        assert desk.recorder.status[0] == "dead"
        final = (await _all(desk.send("hello")))[-1]
        assert "Hello there." in _texts(final)
        assert model.engines == 2

    _run(story)


def test_a_conversation_that_has_outgrown_the_window_is_told_so(model: Any) -> None:
    async def story(desk: Desk) -> None:
        final = (await _all(desk.send("hello " * 60)))[-1]
        turn = desk.conversations.of("s").turns[0]
        assert turn.status == "failed"
        assert "256" in turn.error
        assert any("256" in text for text in _texts(final))

    _run(story, num_blocks=16)


def test_stop_says_so_in_the_line_and_an_answer_fits_the_window(model: Any) -> None:
    async def story(desk: Desk) -> None:
        updates = desk.send("a story")
        await _until_text(updates, "Once upon")
        await desk.chat.stop(_request("s"))
        await _all(updates)
        turn = desk.conversations.of("s").turns[0]
        assert turn.stats is not None
        assert turn.stats.reason == "stopped"
        await _all(desk.send("a story again, to the end of the window"))
        last = desk.conversations.of("s").turns[1]
        assert last.stats is not None
        assert last.stats.reason == "length"
        assert last.stats.context == last.stats.max_context == 32 * 16

    _run(story, num_blocks=32)


def test_restarting_with_another_pool_and_back_when_that_is_impossible(model: Any) -> None:
    async def story(desk: Desk) -> None:
        await asyncio.to_thread(desk.host.restart, 48, "lpm")
        assert (desk.host.num_blocks, desk.host.policy) == (48, "lpm")
        assert list(model.options["policies"]) == ["lpm"]
        final = (await _all(desk.send("hello")))[-1]
        assert "Hello there." in _texts(final)
        with pytest.raises(Exception, match="no plugin is called 'nonsense'"):
            await asyncio.to_thread(desk.host.restart, 64, "nonsense")
        assert (desk.host.num_blocks, desk.host.policy) == (48, "lpm")
        await desk.until(lambda h: h["num_blocks"] == 48)

    _run(story)


def test_the_page_takes_no_connection_that_stays_and_queues_nobody(model: Any) -> None:
    desk = Desk()
    try:
        page = in_event_loop(lambda: build_page(desk.host, desk.recorder, desk.conversations))
        config = page.get_config_file()
        assert config["connect_heartbeat"] is False
        answering = [one for one in page.fns.values() if inspect.isasyncgenfunction(one.fn)]
        assert len(answering) == 4  # send, example, retry, edit
        assert all(one.concurrency_limit is None for one in answering)
        assert page.max_threads >= 64
        assert not page.analytics_enabled
        assert not any(isinstance(block, gr.State | gr.Timer) for block in page.blocks.values())
    finally:
        desk.close()
