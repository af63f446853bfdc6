"""A hook that calls back into the engine it was called from gets an EngineError that says what to do instead."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from plugin_bench import Bench, make_plugin
from waiting import wait_until

from minivllm_plugin.errors import EngineError, RequestAbortedError
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.serving.llm import LLM
from minivllm_plugin.serving.stream import RequestStream
from minivllm_plugin.testing import LedgerRunner, scripted_llm

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
CALLS: dict[str, Callable[[LLM], object]] = {
    "submit": lambda llm: llm.submit([1, 2, 3]),
    "stream": lambda llm: llm.stream([1, 2, 3]),
    "generate": lambda llm: llm.generate([[1, 2, 3]], use_tqdm=False),
    "close": lambda llm: llm.close(),
}


@pytest.mark.parametrize("hook", ["step_started", "step_finished", "blocks_changed", "step_budget", "order_waiting"])
@pytest.mark.parametrize("call", ["step", "add_prompt", "abort", "generate"])
def test_an_engine_driven_by_hand_refuses(hook: str, call: str) -> None:
    caught: list[str] = []
    benches: list[Bench] = []

    def back() -> None:
        engine = benches[0].engine
        arguments: dict[str, tuple[Any, ...]] = {"add_prompt": ([1, 2],), "abort": ("a",), "generate": ([[1, 2]],)}
        try:
            getattr(engine, call)(*arguments.get(call, ()))
        except EngineError as error:
            caught.append(str(error))

    plugin = make_plugin(**{hook: back})
    kind = {"policies": [plugin]} if hook in ("step_budget", "order_waiting") else {"plugins": [plugin]}
    bench = Bench(**kind)  # type: ignore[arg-type]
    benches.append(bench)
    for name in "ab":
        bench.add([1, 2, 3], request_id=name)
    bench.finish()
    bench.check_tokens()
    assert caught
    assert set(caught) == {
        "a plugin called back into the engine from inside a hook; hand the work to another thread, or use the handle of "
        "minivllm_engine_started"
    }
    assert bench.report().errors == ()


def test_also_from_inside_a_generator_that_answers() -> None:
    caught: list[EngineError] = []
    benches: list[Bench] = []

    def order_waiting(waiting: Any) -> Iterator[str]:
        for request in waiting:
            try:
                benches[0].engine.abort(request.request_id)
            except EngineError as error:
                caught.append(error)
            yield request.request_id

    bench = Bench(policies=[make_plugin(order_waiting=order_waiting)])
    benches.append(bench)
    for name in "abc":
        bench.add([1, 2, 3], request_id=name)
    bench.finish()
    assert len(caught) == 3
    assert [seq.finish_reason for seq in bench.sequences] == ["length"] * 3


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("hook", ["request_queued", "step_started", "request_finished", "admit"])
def test_a_live_engine_refuses_on_its_own_thread(hook: str, call: Callable[[LLM], object]) -> None:
    caught: list[BaseException] = []
    llms: list[LLM] = []

    def back() -> None:
        try:
            call(llms[0])
        except EngineError as error:
            caught.append(error)

    plugin = make_plugin(**{hook: back})
    llm, _ = scripted_llm(options={"policies" if hook == "admit" else "plugins": [plugin]})
    llms.append(llm)
    with llm:
        output = llm.submit([1, 2, 3], PARAMS).result(timeout=20)
        assert len(output.outputs[0].token_ids) == 6
        assert llm.is_healthy
    assert caught
    assert "came from the engine's own thread and would wait for itself; hand the work to another thread" in str(caught[0])
    assert llm.plugins()[0].errors == ()


READS: dict[str, Callable[[RequestStream], object]] = {
    "result": lambda stream: stream.result(timeout=20),
    "iterate": lambda stream: list(stream),
    "aresult": lambda stream: asyncio.run(_aresult(stream)),
    "async for": lambda stream: asyncio.run(_collect(stream)),
}


async def _aresult(stream: RequestStream) -> object:
    return await stream.aresult(timeout=20)


async def _collect(stream: RequestStream) -> list[object]:
    return [delta async for delta in stream]


@pytest.mark.parametrize("read", READS.values(), ids=READS)
@pytest.mark.parametrize("hook", ["step_started", "request_finished"])
def test_a_stream_is_not_waited_for_inside_a_hook_and_goes_on(hook: str, read: Callable[[RequestStream], object]) -> None:
    caught: list[str] = []
    streams: list[RequestStream] = []
    gate = threading.Event()

    def back() -> None:
        try:
            for stream in streams:  # none yet if the engine is quicker than this test
                read(stream)
        except EngineError as error:
            caught.append(str(error))

    llm, _ = scripted_llm(options={"plugins": [make_plugin(**{hook: back})]}, gate=gate)
    with llm:
        streams.append(llm.submit([1, 2, 3], PARAMS))
        gate.set()
        wait_until(lambda: len(caught) > 0)
        assert len(streams[0].result(timeout=20).outputs[0].token_ids) == 6
    assert "hand the work to another thread" in caught[0]
    assert llm.plugins()[0].errors == ()


def test_the_refusal_counts_as_an_error_of_the_plugin_that_lets_it_through() -> None:
    llms: list[LLM] = []
    llm, _ = scripted_llm(options={"plugins": [make_plugin(step_started=lambda plan: llms[0].submit([1]))]})
    llms.append(llm)
    with llm:
        assert len(llm.submit([1, 2, 3], PARAMS).result(timeout=20).outputs[0].token_ids) == 6
        assert llm.plugins()[0].errors == ("step_started: 5 errors in a row",)


def test_the_handle_may_be_used_inside_a_hook_and_from_other_threads() -> None:
    handles: list[Any] = []
    steps: list[int] = []
    gate = threading.Event()

    def step_started(plan: Any) -> None:
        steps.append(handles[0].snapshot().step)
        if len(steps) == 3:
            handles[0].abort("a")

    plugin = make_plugin(engine_started=handles.append, step_started=step_started)
    llm, runner = scripted_llm(options={"plugins": [plugin]}, gate=gate)
    with llm:
        first = llm.submit([1, 2, 3], PARAMS, request_id="a")
        gate.set()
        with pytest.raises(RequestAbortedError, match="after 3 tokens"):
            first.result(timeout=20)
        gate.clear()
        runner.entered.clear()
        second = llm.submit([1, 2, 3], PARAMS, request_id="b")
        assert runner.entered.wait(20)
        worker = threading.Thread(target=handles[0].abort, args=("b",))
        worker.start()
        worker.join()
        gate.set()
        with pytest.raises(RequestAbortedError):
            second.result(timeout=20)
        assert llm.plugins()[0].errors == ()


def test_two_engines_may_call_each_other() -> None:
    inner = Bench()
    tokens: list[int] = []

    def step_finished() -> None:
        inner.add([7, 8, 9], 1)
        inner.finish()
        tokens.append(1)

    outer = Bench(plugins=[make_plugin(step_finished=step_finished)])
    assert isinstance(outer.runner, LedgerRunner)
    outer.add([1, 2, 3], 3)
    outer.finish()
    assert len(tokens) == 3
