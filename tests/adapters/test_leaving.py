"""Whoever leaves takes the request along: streams, whole answers, timeouts. (Kind: G07, and who enforces ``timeout``.)

Each test stops generation at a gate, so the request is surely alive when its reader leaves.
"""

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import litellm
import pytest
from eventually import aeventually, eventually

from minivllm_adapters.handler import MinivllmProvider

MODEL = "minivllm/fake"
MESSAGES = [{"role": "user", "content": "hello"}]


@pytest.fixture
def gate(provider: MinivllmProvider, llm: Any) -> Iterator[threading.Event]:
    """Two tokens, then nothing until it is set."""
    gate = threading.Event()
    llm.steps = ["a", "b", gate, "c"]
    yield gate
    gate.set()


def _stream(**kwargs: Any) -> Any:
    return litellm.completion(model=MODEL, messages=MESSAGES, stream=True, **kwargs)


async def _astream(**kwargs: Any) -> Any:
    return await litellm.acompletion(model=MODEL, messages=MESSAGES, stream=True, **kwargs)


def _ask(*, streaming: bool, asynchronous: bool, **kwargs: Any) -> None:
    """One call in one of the four styles, read to its end."""

    async def ask() -> None:
        answer = await litellm.acompletion(model=MODEL, messages=MESSAGES, stream=streaming, **kwargs)
        if streaming:
            async for _ in answer:
                pass

    if asynchronous:
        asyncio.run(ask())
    else:
        list(litellm.completion(model=MODEL, messages=MESSAGES, stream=streaming, **kwargs))


def _left(llm: Any, times: int = 1) -> bool:
    gc.collect()
    return not llm.live and len(llm.aborted) == times and not llm.finished


def test_breaking_out_of_a_loop(gate: threading.Event, llm: Any) -> None:
    for chunk in _stream():
        if chunk.choices[0].delta.content == "b":
            break
    del chunk
    eventually(lambda: _left(llm))  # LiteLLM's logging threads may hold the stream a moment longer


def test_close_is_idempotent_and_ends_the_stream(gate: threading.Event, llm: Any) -> None:
    stream = _stream()
    assert next(stream).choices[0].delta.content == "a"
    stream.close()
    assert _left(llm)
    stream.close()
    assert list(stream) == []
    assert len(llm.aborted) == 1


def test_leaving_a_with_block(gate: threading.Event, llm: Any) -> None:
    with _stream() as stream:
        next(stream)
    assert _left(llm)


def test_dropping_an_unread_stream(gate: threading.Event, llm: Any) -> None:
    stream = _stream()
    assert len(llm.live) == 1  # admitted before anything is read
    del stream
    eventually(lambda: _left(llm))


def test_closing_after_the_end_does_nothing(gate: threading.Event, llm: Any) -> None:
    gate.set()
    stream = _stream()
    assert len(list(stream)) == 4
    stream.close()
    del stream
    gc.collect()
    assert llm.aborted == []
    assert len(llm.finished) == 1


def test_closing_from_another_thread(provider: MinivllmProvider, gate: threading.Event, llm: Any) -> None:
    chunks = provider.streaming("fake", MESSAGES)
    next(chunks)
    closer = threading.Thread(target=chunks.close)  # type: ignore[attr-defined]
    closer.start()
    closer.join()
    assert _left(llm)
    assert next(chunks, None) is None


@pytest.mark.parametrize("how", ["break", "aclose", "with", "unread", "loop ends"])
def test_leaving_an_async_stream(gate: threading.Event, llm: Any, how: str) -> None:
    async def leave() -> None:
        stream = await _astream()
        if how == "break":
            async for _ in stream:
                break
        elif how == "aclose":
            await anext(stream)
            await stream.aclose()
            assert _left(llm)
            await stream.aclose()
        elif how == "with":
            async with stream:
                await anext(stream)
            assert _left(llm)
        elif how == "loop ends":
            await anext(stream)

    asyncio.run(leave())
    eventually(lambda: _left(llm))


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("how", ["cancel", "wait_for"])
def test_cancelling_the_task_that_waits(gate: threading.Event, llm: Any, streaming: bool, how: str) -> None:
    async def read() -> None:
        if streaming:
            async for _ in await _astream():
                pass
        else:
            await litellm.acompletion(model=MODEL, messages=MESSAGES)

    async def leave() -> None:
        task = asyncio.ensure_future(read())
        await aeventually(lambda: llm.live)
        if how == "cancel":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(task, 0.01)
        await aeventually(lambda: _left(llm))

    asyncio.run(leave())


def test_cancelling_many_at_once_leaves_none(gate: threading.Event, llm: Any) -> None:
    async def leave() -> None:
        calls = [litellm.acompletion(model=MODEL, messages=MESSAGES, stream=bool(i % 2)) for i in range(20)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await aeventually(lambda: len(llm.submissions) == 20)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(leave())
    eventually(lambda: _left(llm, times=20))


@pytest.mark.parametrize("how", ["cancel", "timeout"])
def test_leaving_while_the_request_is_being_submitted(provider: MinivllmProvider, llm: Any, how: str) -> None:
    """The worker thread that submits cannot be stopped; what it submits for nobody is aborted."""
    entered, gate, submit = threading.Event(), threading.Event(), llm.submit_chat

    def slowly(*args: Any, **kwargs: Any) -> Any:
        entered.set()
        assert gate.wait(30)
        return submit(*args, **kwargs)

    llm.submit_chat = slowly

    async def leave() -> None:
        timeout = 0.05 if how == "timeout" else None
        task = asyncio.ensure_future(provider.acompletion("fake", MESSAGES, timeout=timeout))
        await aeventually(entered.is_set)
        if how == "cancel":
            task.cancel()
        with pytest.raises(asyncio.CancelledError if how == "cancel" else litellm.Timeout):
            await task
        assert not llm.submissions
        gate.set()

    asyncio.run(leave())
    eventually(lambda: _left(llm))


def test_a_deadline_that_passes_with_the_load_reaches_no_engine(
    provider: MinivllmProvider, registry: Any, llm: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("minivllm_adapters.deadlines.Deadline.remaining", lambda deadline: 0.0 if registry.loaded() else 9.0)
    for call in (provider.completion, provider.streaming):
        with pytest.raises(litellm.Timeout, match="loading"):
            call("fake", MESSAGES)
    assert not llm.submissions


def test_a_keyboard_interrupt_aborts(provider: MinivllmProvider, llm: Any) -> None:
    class Interrupting:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stream, name)

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> Any:
            raise KeyboardInterrupt

        def result(self) -> Any:
            raise KeyboardInterrupt

    submit = llm.submit_chat
    llm.submit_chat = lambda *args, **kwargs: Interrupting(submit(*args, **kwargs))
    with pytest.raises(KeyboardInterrupt):
        list(provider.streaming("fake", MESSAGES))
    with pytest.raises(KeyboardInterrupt):
        provider.completion("fake", MESSAGES, optional_params={"n": 3})
    assert _left(llm, times=2)


# --- timeouts: LiteLLM passes them on and never enforces them -----------------------------------------------------------------


@pytest.mark.parametrize("timeout", [0.05, "0.05", httpx.Timeout(0.05)], ids=["float", "str", "httpx"])
@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_timeout_ends_the_call_and_the_request(
    gate: threading.Event, llm: Any, timeout: Any, streaming: bool, asynchronous: bool
) -> None:
    with pytest.raises(litellm.Timeout) as caught:
        _ask(streaming=streaming, asynchronous=asynchronous, timeout=timeout)
    assert type(caught.value) is litellm.Timeout
    assert _left(llm)


@pytest.mark.parametrize("streaming", [True, False])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_timeout_covers_loading_too(
    provider: MinivllmProvider, registry: Any, llm: Any, streaming: bool, asynchronous: bool
) -> None:
    """The caller leaves, the load goes on, and the next caller finds the model."""
    registry.gate.clear()
    with pytest.raises(litellm.Timeout, match="loading"):
        _ask(streaming=streaming, asynchronous=asynchronous, timeout=0.05)
    assert not llm.submissions
    registry.gate.set()
    assert litellm.completion(model=MODEL, messages=MESSAGES).choices[0].message.content
    assert len(registry.load_threads) == 1


def test_what_is_left_of_the_timeout_goes_to_the_engine(provider: MinivllmProvider, llm: Any) -> None:
    litellm.completion(model=MODEL, messages=MESSAGES, timeout=100)
    assert 90 < llm.submissions[-1].options["timeout"] <= 100
    litellm.completion(model=MODEL, messages=MESSAGES)
    assert 590 < llm.submissions[-1].options["timeout"] <= 600
    provider.completion("fake", MESSAGES, timeout=float("inf"))
    assert llm.submissions[-1].options["timeout"] is None


# --- loading ------------------------------------------------------------------------------------------------------------------


def test_first_callers_share_one_load_on_its_own_thread(provider: MinivllmProvider, registry: Any, llm: Any) -> None:
    registry.gate.clear()

    async def first() -> list[Any]:
        calls = [asyncio.ensure_future(litellm.acompletion(model=MODEL, messages=MESSAGES)) for _ in range(5)]
        await aeventually(lambda: registry.load_threads)
        calls[0].cancel()  # one that leaves does not take the load with it
        await asyncio.sleep(0)
        registry.gate.set()
        return await asyncio.gather(*calls, return_exceptions=True)

    results = asyncio.run(first())
    assert isinstance(results[0], asyncio.CancelledError)
    assert [r.choices[0].message.content for r in results[1:]] == ["Paris is the capital of France."] * 4
    assert registry.load_threads == ["minivllm-load-fake"]
    assert not any(thread.name.startswith("minivllm-load") for thread in threading.enumerate())


def test_a_dead_engine_is_replaced_by_the_registry(provider: MinivllmProvider, registry: Any, llm: Any) -> None:
    litellm.completion(model=MODEL, messages=MESSAGES)
    litellm.completion(model=MODEL, messages=MESSAGES)
    assert len(registry.load_threads) == 1  # a live one is not asked for again
    llm.is_healthy = False
    litellm.completion(model=MODEL, messages=MESSAGES)
    assert len(registry.load_threads) == 2
