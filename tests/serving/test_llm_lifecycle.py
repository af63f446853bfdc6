"""One LLM under threads, event loops, people who leave early, deadlines, and an engine that dies."""

import asyncio
import contextlib
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from waiting import wait_until

from minivllm_plugin import LLM, RequestStream, SamplingParams
from minivllm_plugin.errors import (
    EngineClosedError,
    EngineDeadError,
    EngineError,
    RequestAbortedError,
    RequestTimeoutError,
)
from minivllm_plugin.testing import HashedTokens, LedgerRunner, scripted_llm

LONG = SamplingParams(max_tokens=200, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture
def slow() -> Iterator[tuple[LLM, LedgerRunner]]:
    """One sequence at a time, a millisecond or so a step: time enough to leave in the middle."""
    hashed = HashedTokens(1000)

    def choose(seq: object) -> int:
        time.sleep(0.001)
        return hashed(seq)  # type: ignore[arg-type]

    llm, runner = scripted_llm(choose=choose, options={"max_num_sequences": 1})
    yield llm, runner
    llm.close()


def idle(llm: LLM) -> bool:
    snapshot = llm.snapshot()
    return snapshot.num_running == snapshot.num_waiting == 0 and snapshot.num_free_blocks == snapshot.num_blocks


# --- leaving early -------------------------------------------------------------------------------------------------


def take_two_and_close(stream: RequestStream) -> None:
    next(stream), next(stream)
    stream.close()
    stream.close()
    assert list(stream) == []


def take_two_and_break(stream: RequestStream) -> None:
    for number, _ in enumerate(stream):
        if number == 1:
            break


def leave_the_context(stream: RequestStream) -> None:
    with stream:
        next(stream)


def never_look(stream: RequestStream) -> None:
    pass


def raise_inside(stream: RequestStream) -> None:
    with pytest.raises(KeyError), stream:
        next(stream)
        raise KeyError("the consumer's own fault")


async def async_break(stream: RequestStream) -> None:
    async for _ in stream:
        break


async def async_context(stream: RequestStream) -> None:
    async with stream:
        await anext(stream)


async def cancelled_task(stream: RequestStream) -> None:
    async def read() -> None:
        async for _ in stream:
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(0.005)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def wait_for(stream: RequestStream) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stream.aresult(), 0.005)


@pytest.mark.parametrize("leave", [take_two_and_close, take_two_and_break, leave_the_context, never_look, raise_inside])
def test_a_thread_that_leaves_aborts(slow: tuple[LLM, LedgerRunner], leave: Callable[[RequestStream], None]) -> None:
    llm, _ = slow
    leave(llm.stream([1, 2, 3], LONG))  # nothing else holds it, so it is dropped here at the latest
    gc.collect()
    assert len(llm.submit([4], SHORT).result().outputs[0].token_ids) == 5  # the only place is free again
    wait_until(lambda: idle(llm))


@pytest.mark.parametrize("leave", [async_break, async_context, cancelled_task, wait_for])
def test_a_coroutine_that_leaves_aborts(
    slow: tuple[LLM, LedgerRunner], leave: Callable[[RequestStream], Awaitable[None]]
) -> None:
    llm, _ = slow

    async def main() -> int:
        await leave(llm.stream([1, 2, 3], LONG))
        gc.collect()
        return len((await llm.submit([4], SHORT).aresult()).outputs[0].token_ids)

    assert asyncio.run(main()) == 5
    wait_until(lambda: idle(llm))


def test_a_reader_whose_loop_is_gone_is_aborted(slow: tuple[LLM, LedgerRunner]) -> None:
    llm, _ = slow
    kept = []

    async def main() -> None:
        kept.append(llm.stream([1, 2, 3], LONG))
        await anext(kept[0])

    asyncio.run(main())
    kept[0].close()
    wait_until(lambda: idle(llm))


def test_an_abort_by_id_shows_once_with_the_partial_text(slow: tuple[LLM, LedgerRunner]) -> None:
    llm, _ = slow
    stream = llm.submit([1, 2, 3], LONG, request_id="mine")
    first = next(stream)
    llm.abort("mine")
    llm.abort("mine")
    llm.abort("nobody")
    deltas = [first, *stream]
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["abort"]
    assert list(stream) == []
    assert stream.output.outputs[0].token_ids == [token for delta in deltas for token in delta.token_ids]
    with pytest.raises(RequestAbortedError, match="'mine'"):
        stream.result()
    wait_until(lambda: idle(llm))


def test_an_abort_while_waiting_never_starts(slow: tuple[LLM, LedgerRunner]) -> None:
    llm, runner = slow
    running = llm.submit([1, 2, 3], LONG)
    next(running)
    waiting = llm.submit([4, 5], SHORT, request_id="waiting")
    llm.abort("waiting")
    with pytest.raises(RequestAbortedError):
        waiting.result()
    running.close()
    assert "waiting" not in {row.request_id for batch in runner.batches for row in batch.rows}


# --- deadlines -----------------------------------------------------------------------------------------------------


def test_a_deadline_aborts_a_reader_that_waits(slow: tuple[LLM, LedgerRunner]) -> None:
    llm, _ = slow
    stream = llm.submit([1, 2, 3], LONG, timeout=0.02)
    with pytest.raises(RequestTimeoutError):
        stream.result()
    with pytest.raises(RequestTimeoutError):
        llm.submit([1, 2, 3], LONG).result(timeout=0.02)
    with pytest.raises(RequestTimeoutError):
        for _ in llm.submit([1, 2, 3], LONG, timeout=0.02):
            pass
    wait_until(lambda: idle(llm))


def test_a_deadline_aborts_for_a_coroutine_and_for_nobody(slow: tuple[LLM, LedgerRunner]) -> None:
    llm, _ = slow

    async def main() -> None:
        with pytest.raises(RequestTimeoutError):
            await llm.submit([1, 2, 3], LONG, timeout=0.02).aresult()
        with pytest.raises(RequestTimeoutError):
            async for _ in llm.submit([1, 2, 3], LONG, timeout=0.02):
                pass

    asyncio.run(main())
    kept = llm.submit([1, 2, 3], LONG, timeout=0.02)  # nobody reads it
    wait_until(lambda: idle(llm))
    with pytest.raises(RequestTimeoutError):
        kept.result()


def test_a_deadline_covers_the_queue() -> None:
    gate = threading.Event()
    llm, runner = scripted_llm(gate=gate)
    with llm:
        blocked = llm.submit([1], SHORT)
        wait_until(runner.entered.is_set)
        with pytest.raises(RequestTimeoutError):
            llm.submit([2], SHORT, timeout=0.01).result()
        gate.set()
        assert blocked.result().finished


# --- company -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"max_num_sequences": 3}, {"max_num_batched_tokens": 7}, {"max_queue_size": 100}], ids=str
)
def test_threads_get_their_own_tokens(options: dict[str, int]) -> None:
    prompts = [[thread + 1, number + 1, *range(1, thread + 2)] for thread in range(8) for number in range(10)]
    llm, _ = scripted_llm(num_blocks=24, options=options)
    with llm:
        alone = [llm.generate(prompt, SHORT, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
        barrier = threading.Barrier(8)

        def caller(thread: int) -> list[list[int]]:
            barrier.wait()
            mine = prompts[thread * 10 : thread * 10 + 10]
            return [llm.generate(prompt, SHORT, use_tqdm=False)[0].outputs[0].token_ids for prompt in mine]

        with ThreadPoolExecutor(8) as pool:
            together = [tokens for result in pool.map(caller, range(8)) for tokens in result]
    assert together == alone


def test_several_event_loops_and_threads_at_once() -> None:
    llm, _ = scripted_llm()
    with llm:

        async def one(prompt: int) -> list[int]:
            return [token async for delta in llm.stream([prompt], SHORT) for token in delta.token_ids]

        async def many(offset: int) -> list[list[int]]:
            return await asyncio.gather(*(one(offset + number) for number in range(20)))

        expected = [llm.generate([n], SHORT, use_tqdm=False)[0].outputs[0].token_ids for n in range(1, 61)]
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(lambda offset: asyncio.run(many(offset)), (1, 21, 41)))
    assert [tokens for result in results for tokens in result] == expected


def test_blocking_calls_work_inside_a_running_loop() -> None:
    llm, _ = scripted_llm()
    with llm:

        async def main() -> int:
            return len(llm.generate([1, 2], SHORT, use_tqdm=False)[0].outputs[0].token_ids)

        assert asyncio.run(main()) == 5


def test_calls_from_the_engine_thread_are_refused() -> None:
    caught: list[Exception] = []
    cell: list[LLM] = []

    def choose(seq: object) -> int:
        try:
            cell[0].submit([1], SHORT)
        except Exception as error:
            caught.append(error)
        return 1

    llm, _ = scripted_llm(choose=choose)
    cell.append(llm)
    with llm:
        llm.generate([3], SHORT, use_tqdm=False)
    assert {type(error) for error in caught} == {EngineError}


# --- death and end -------------------------------------------------------------------------------------------------


def test_a_dying_engine_fails_every_waiter_with_the_cause() -> None:
    llm, _ = scripted_llm(fail_on_call=5, options={"max_num_sequences": 2})
    with llm:
        reading, queued = llm.submit([1], LONG), [llm.submit([n], LONG) for n in range(2, 6)]
        tokens = []
        with pytest.raises(EngineDeadError, match="fails on purpose") as died:
            for delta in reading:
                tokens += delta.token_ids
        assert len(tokens) == 4
        assert isinstance(died.value.__cause__, RuntimeError)

        async def read() -> None:
            await queued[0].aresult()

        with pytest.raises(EngineDeadError):
            asyncio.run(read())
        for stream in queued[1:]:
            with pytest.raises(EngineDeadError):
                stream.result()
        assert not llm.is_healthy
        with pytest.raises(EngineDeadError, match="fails on purpose"):
            llm.submit([1], SHORT)


def test_a_consumer_that_fails_does_not_disturb_its_neighbour() -> None:
    llm, _ = scripted_llm()
    with llm:
        bad, good = llm.submit([1], LONG), llm.submit([2], SHORT)

        def broken(*_: object) -> object:
            raise OSError("a broken tokenizer")

        next(iter(bad._choices.values()))._detokenizer.feed = broken  # type: ignore[method-assign,assignment]
        with pytest.raises(Exception, match="a broken tokenizer"):
            bad.result()
        assert len(good.result().outputs[0].token_ids) == 5
        wait_until(lambda: idle(llm))


def test_failing_to_start_raises_the_cause_and_leaves_no_thread() -> None:
    before = threading.active_count()
    with pytest.raises(Exception, match="no-such-model"):
        LLM("no-such-model")
    wait_until(lambda: threading.active_count() <= before)


def test_a_dropped_llm_stops_its_thread() -> None:
    llm, _ = scripted_llm()
    thread, gone = llm._service._thread, weakref.ref(llm)
    del llm
    gc.collect()
    assert gone() is None
    wait_until(lambda: not thread.is_alive())


def test_a_stream_keeps_the_engine_until_it_is_dropped() -> None:
    gate = threading.Event()
    llm, _ = scripted_llm(gate=gate)
    thread, stream = llm._service._thread, llm.submit([1], SHORT)
    del llm
    gc.collect()
    gate.set()
    assert len(stream.result().outputs[0].token_ids) == 5
    assert thread.is_alive()
    del stream
    gc.collect()
    wait_until(lambda: not thread.is_alive())


def test_close_from_many_threads() -> None:
    llm, _ = scripted_llm()
    streams = [llm.submit([n + 1], LONG) for n in range(10)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: llm.close(), range(4)))
    for stream in streams:
        with contextlib.suppress(EngineClosedError):
            stream.result()
    assert not llm._service._thread.is_alive()


SCRIPT = """
from minivllm_plugin import SamplingParams
from minivllm_plugin.testing import scripted_llm
llm, _ = scripted_llm()
stream = llm.stream([1, 2], SamplingParams(max_tokens=200, ignore_eos=True))
print(len(next(stream).token_ids) > 0)
"""


def test_a_program_that_just_ends_ends() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_is_told_so() -> None:
    script = SCRIPT + (
        "import os, sys\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        llm.submit([1])\n"
        "    except Exception as error:\n"
        "        os._exit(7 if 'fork' in str(error) else 8)\n"
        "    os._exit(9)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 7, done.stderr
