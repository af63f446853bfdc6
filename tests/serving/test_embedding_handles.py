"""The handle of an embedding: every way to leave early, and readers that come too many or too late. No model."""

import asyncio
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from waiting import wait_until

from minivllm_plugin import LLM
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.errors import (
    ContextWindowExceededError,
    EngineClosedError,
    InvalidRequestError,
    RequestAbortedError,
    RequestTimeoutError,
)
from minivllm_plugin.runner.rows import LogitRows
from minivllm_plugin.testing import LedgerRunner, scripted_llm


class PoolingRunner(LedgerRunner):
    """A runner whose hidden state of a token is its id, and a constant."""

    can_pool = True

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        tokens = super().run(seqs, is_prefill)
        wanted, rows = LogitRows(), []
        for index, seq in enumerate(seqs):
            wanted.add(index, seq, len(rows))
            rows += seq.token_ids[seq.num_computed_tokens : seq.num_computed_tokens + seq.num_scheduled_tokens]
        hidden = torch.tensor([[float(rows[row]), 1.0] for row in wanted.pooled]).reshape(-1, 2)
        for index in wanted.take_embeddings(hidden, seqs):
            tokens[index] = FAILED_TOKEN
        return tokens


def pooling_llm(**options: Any) -> tuple[LLM, LedgerRunner]:
    return scripted_llm(runner=PoolingRunner, **options)


@pytest.fixture
def held() -> Iterator[tuple[LLM, LedgerRunner, threading.Event]]:
    """An engine that waits in its first step, of two tokens, until the event is set."""
    gate = threading.Event()
    llm, runner = pooling_llm(gate=gate, options={"max_num_batched_tokens": 2, "max_num_sequences": 2})
    yield llm, runner, gate
    gate.set()
    llm.close()


def free(llm: LLM) -> bool:
    """Whether a later request finds everything free again."""
    llm.embed([[9]], use_tqdm=False)
    wait_until(lambda: llm.snapshot().num_running == 0)
    snapshot = llm.snapshot()
    return snapshot.num_waiting == 0 and snapshot.num_used_blocks == 0


def test_close_and_dropping_abort(held: tuple[LLM, LedgerRunner, threading.Event]) -> None:
    llm, runner, gate = held
    handles = [llm.submit_embedding([number] * 5) for number in range(1, 4)]
    assert runner.entered.wait(20)
    handles[0].close()
    handles.pop(1)
    llm.abort(handles[1].request_id)
    gate.set()
    for handle in handles:
        for _ in range(2):
            with pytest.raises(RequestAbortedError):
                handle.result()
    assert free(llm)


def test_a_deadline(held: tuple[LLM, LedgerRunner, threading.Event]) -> None:
    llm, runner, gate = held
    first, second = llm.submit_embedding([1, 2], timeout=0.05), llm.submit_embedding([3, 4], timeout=0.05)
    assert runner.entered.wait(20)
    for _ in range(2):
        with pytest.raises(RequestTimeoutError):
            first.result()
    with pytest.raises(RequestTimeoutError):
        asyncio.run(second.aresult())
    gate.set()
    assert free(llm)


def test_a_cancelled_task_aborts(held: tuple[LLM, LedgerRunner, threading.Event]) -> None:
    llm, runner, gate = held

    async def leave() -> None:
        handle = llm.submit_embedding([1, 2])
        task = asyncio.create_task(handle.aresult())
        while not runner.entered.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(RequestAbortedError):
            await handle.aresult()

    asyncio.run(leave())
    gate.set()
    assert free(llm)


def test_a_second_reader_is_refused_and_the_first_goes_on(held: tuple[LLM, LedgerRunner, threading.Event]) -> None:
    llm, runner, gate = held
    handle = llm.submit_embedding([1, 2])
    got: list[Any] = []
    reader = threading.Thread(target=lambda: got.append(handle.result()))
    reader.start()
    assert runner.entered.wait(20)
    wait_until(lambda: handle._outbox._bell is not None)
    with pytest.raises(InvalidRequestError, match="another thread"):
        handle.result()
    gate.set()
    reader.join(20)
    assert got[0].embedding == pytest.approx([2 / math.sqrt(5), 1 / math.sqrt(5)])
    assert handle.result() is got[0]


def test_an_engine_that_closes(held: tuple[LLM, LedgerRunner, threading.Event]) -> None:
    llm, runner, gate = held
    handle = llm.submit_embedding([1, 2, 3])
    assert runner.entered.wait(20)
    closing = threading.Thread(target=llm.close)
    closing.start()
    gate.set()
    with pytest.raises(EngineClosedError):
        handle.result()
    closing.join(20)


def test_many_at_once() -> None:
    llm, _ = pooling_llm(options={"max_num_batched_tokens": 7, "max_num_sequences": 5})
    with llm:
        handles = [llm.submit_embedding([number, number]) for number in range(1, 30)]

        async def wait() -> list[Any]:
            return await asyncio.gather(*(handle.aresult() for handle in handles))

        outputs = asyncio.run(wait())
    for number, output in enumerate(outputs, 1):
        assert output.embedding[0] / output.embedding[1] == pytest.approx(number, rel=1e-5)


def test_a_prompt_that_is_bad_is_refused_before_any_starts() -> None:
    llm, runner = pooling_llm()
    with llm:
        for bad, error in (([], InvalidRequestError), ([1000], InvalidRequestError), ([1] * 300, ContextWindowExceededError)):
            with pytest.raises(error):
                llm.embed([[1, 2], bad], use_tqdm=False)
        with pytest.raises(InvalidRequestError):
            llm.embed("text, and no tokenizer", use_tqdm=False)
    assert runner.num_calls == 0


@pytest.mark.parametrize("timeout", [0, -1.5])
def test_a_timeout_that_could_only_pass_is_refused_as_for_completions(timeout: float) -> None:
    llm, runner = scripted_llm()
    with llm:
        for submit in (llm.submit, llm.submit_embedding):
            with pytest.raises(InvalidRequestError, match=rf"timeout={timeout} must be greater than 0 seconds"):
                submit([1, 2], timeout=timeout)
        assert runner.num_calls == 0
