"""Calls that nobody should make, and ids, streams and engines that are reused, dropped or shared at the wrong moment."""

import asyncio
import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from waiting import wait_until

from minivllm_plugin import LLM, RequestStream, SamplingParams
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.errors import EngineDeadError, InvalidRequestError, RequestTimeoutError
from minivllm_plugin.serving.loading import Loaded
from minivllm_plugin.testing import HashedTokens, LedgerRunner, scripted_llm

LONG = SamplingParams(max_tokens=100, ignore_eos=True)
SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


def slowly() -> Callable[[Any], int]:
    hashed = HashedTokens(1000)

    def choose(seq: Any) -> int:
        time.sleep(0.002)
        return hashed(seq)

    return choose


@pytest.fixture
def llm() -> Iterator[LLM]:
    llm, _ = scripted_llm(choose=slowly())
    yield llm
    llm.close()


def odd_calls() -> Iterator[Any]:
    bad: Any

    def one(name: str, bad: Any, call: Callable[[LLM, Any], object]) -> Any:
        return pytest.param(lambda llm: call(llm, bad), id=f"{name}={bad!r:.30}")

    for bad in (5, None, ["request-0"]):
        yield one("abort", bad, lambda llm, bad: llm.abort(bad))
    for bad in (5, [], b"x", True):
        yield one("request_id", bad, lambda llm, bad: llm.submit([1], SHORT, request_id=bad))
    for bad in (5, [], b"x", ""):
        yield one("cache_salt", bad, lambda llm, bad: llm.submit([1], SHORT, cache_salt=bad))
    for bad in (None, "1", 1.5, True):
        yield one("priority", bad, lambda llm, bad: llm.submit([1], SHORT, priority=bad))
    for bad in ("5", [], True, float("nan")):
        yield one("timeout", bad, lambda llm, bad: llm.submit([1], SHORT, timeout=bad))
        yield one("result", bad, lambda llm, bad: llm.submit([1], SHORT).result(timeout=bad))
    for bad in (5, {"role": "user", "content": "x"}, range(0), {1, 2}):
        yield one("chat", bad, lambda llm, bad: llm.chat(bad, SHORT))
    for bad in (5, "abc", [1]):
        yield one("chat_template_kwargs", bad, lambda llm, bad: llm.chat([], SHORT, chat_template_kwargs=bad))


@pytest.mark.parametrize("call", list(odd_calls()))
def test_an_odd_call_is_refused_and_hurts_nobody(llm: LLM, call: Callable[[LLM], object]) -> None:
    running = llm.submit([7], LONG)
    with pytest.raises(InvalidRequestError):
        call(llm)
    assert len(running.result().outputs[0].token_ids) == 100
    assert llm.is_healthy


@pytest.mark.parametrize("forever", [float("inf"), 1e10, 10**400])
def test_a_timeout_beyond_every_clock_is_none(llm: LLM, forever: float) -> None:
    assert llm.submit([1], SHORT, timeout=forever).result(timeout=forever).finished
    assert len(list(llm.submit([1], SHORT, timeout=forever))) > 0
    assert asyncio.run(finish(llm.submit([1], SHORT, timeout=forever), forever))


async def finish(stream: RequestStream, timeout: float) -> bool:
    return (await stream.aresult(timeout)).finished


def test_no_time_at_all_is_a_timeout(llm: LLM) -> None:
    with pytest.raises(RequestTimeoutError):
        llm.submit([1], LONG).result(timeout=0)


@pytest.mark.parametrize("temperature", [10**30, 2**63, 1e300])
def test_a_huge_temperature_does_not_reach_a_tensor_as_an_integer(temperature: float) -> None:
    assert isinstance(SamplingParams(temperature=temperature).temperature, float)


def test_an_integer_beyond_every_float_is_refused() -> None:
    for name in ("temperature", "top_p", "min_p"):
        with pytest.raises(InvalidRequestError, match=name):
            SamplingParams(**{name: 10**400})  # type: ignore[arg-type]


# --- ids -----------------------------------------------------------------------------------------------------------


def test_ids_from_many_threads(llm: LLM) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            ids = list(pool.map(lambda _: llm._service.next_request_id(), range(20_000)))
    finally:
        sys.setswitchinterval(interval)
    assert len(set(ids)) == len(ids)


def test_a_callers_id_that_looks_like_ours_is_in_nobodys_way(llm: LLM) -> None:
    taken = [llm.submit([1], LONG, request_id=f"request-{number}") for number in range(3)]
    assert llm.submit([2], SHORT).result().request_id not in {stream.request_id for stream in taken}


def test_dropping_an_ended_request_spares_the_next_one_of_its_id(llm: LLM) -> None:
    first = llm.submit([1], SHORT, request_id="mine")
    wait_until(lambda: not llm._service._accepted)
    second = llm.submit([2], LONG, request_id="mine")
    first.close()  # its end was never read
    del first
    assert len(second.result().outputs[0].token_ids) == 100


# --- one stream, one engine ----------------------------------------------------------------------------------------


def test_a_second_reader_is_refused_and_the_first_reads_on(llm: LLM) -> None:
    stream = llm.submit([1], LONG)
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: sum(len(delta.token_ids) for delta in stream))
        wait_until(lambda: stream._outbox._bell is not None)
        with pytest.raises(InvalidRequestError, match="one reader"):
            while not reading.done():
                stream._outbox.wait(None)
            pytest.fail("two readers shared a stream")
        assert reading.result() == 100


def test_a_stream_keeps_its_llm_open() -> None:
    def start() -> RequestStream:
        llm, _ = scripted_llm(choose=slowly())
        return llm.submit([1], LONG)

    before = set(threading.enumerate())  # an engine of another test may still be on its way out
    stream = start()
    (thread,) = (thread for thread in set(threading.enumerate()) - before if thread.name == "minivllm-engine-scripted")
    gc.collect()
    assert len(stream.result().outputs[0].token_ids) == 100
    del stream
    gc.collect()
    wait_until(lambda: not thread.is_alive())


def test_a_dead_engine_keeps_no_weights_though_its_error_is_kept() -> None:
    llm, runner = scripted_llm(fail_on_call=2)
    weights = weakref.ref(runner)
    del runner
    with pytest.raises(EngineDeadError) as kept:
        llm.submit([1], LONG).result()
    wait_until(lambda: not llm._service._thread.is_alive())
    gc.collect()
    assert weights() is None
    assert "fails on purpose" in str(kept.value.__cause__)


def test_an_interrupted_constructor_leaves_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    release, threads = threading.Event(), []
    scheduler = Scheduler(2, 16, 8, 4, 0)
    limits = Limits(vocab_size=1000, max_model_len=32)
    engine = LLMEngine(scheduler, LedgerRunner.for_scheduler(scheduler), limits)

    def loader(config: EngineConfig) -> tuple[LLMEngine, Loaded]:
        threads.append(threading.current_thread())
        release.wait()
        return engine, Loaded(limits, None, {}, 8, "none", "none")

    def interrupted(self: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("minivllm_plugin.serving.service.EngineService.wait_started", interrupted)
    with pytest.raises(KeyboardInterrupt):
        LLM.from_loader(EngineConfig(model="scripted"), loader)
    monkeypatch.undo()
    release.set()
    wait_until(lambda: bool(threads) and not threads[0].is_alive())


# --- the process ---------------------------------------------------------------------------------------------------


def run_program(lines: str, timeout: float) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-W", "ignore", "-c", lines]
    return subprocess.run(program, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("read", ["stream.result()", "next(stream)", "asyncio.run(stream.aresult())"])
def test_a_stream_taken_into_a_forked_child_does_not_wait_for_ever(read: str) -> None:
    done = run_program(
        f"""
import asyncio, os, sys, threading
from minivllm_plugin import SamplingParams
from minivllm_plugin.errors import EngineDeadError
from minivllm_plugin.testing import scripted_llm
gate = threading.Event()
llm, runner = scripted_llm(gate=gate)
stream = llm.stream([1, 2], SamplingParams(max_tokens=20))
runner.entered.wait()
pid = os.fork()
if pid == 0:
    try:
        {read}
    except EngineDeadError as error:
        os._exit(7 if "fork" in str(error) else 8)
    os._exit(9)
code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
gate.set()
stream.result()
sys.exit(code)
""",
        timeout=60,
    )
    assert done.returncode == 7, done.stderr


def test_a_program_ends_though_a_model_is_still_on_its_way() -> None:
    done = run_program(
        """
import threading, time
from minivllm_plugin import LLM
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.serving import service
service.LOAD_PATIENCE = 0.2
loading = threading.Event()
def load(config):
    loading.set()
    time.sleep(300)
threading.Thread(target=LLM.from_loader, args=(EngineConfig(), load), daemon=True).start()
loading.wait()
print("end")
""",
        timeout=20,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")
