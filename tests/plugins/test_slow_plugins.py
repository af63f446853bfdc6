"""Plugins that take too long: measured on a clock that the test turns, reported once, moved to a thread or taken out."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from plugin_bench import Bench, make_plugin
from waiting import wait_until

from minivllm_plugin.plugins import QueuedObserver, calls
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import scripted_llm
from minivllm_plugin.views import Budget


class HandTurned:
    """``time`` as plugins/calls.py sees it: moves when a plugin says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandTurned:
    hand = HandTurned()
    monkeypatch.setattr(calls, "time", hand)
    return hand


def plugin_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("minivllm-plugin-")]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    wait_until(lambda: plugin_threads() == [])


def test_a_slow_observer_is_moved_to_a_thread_with_all_its_hooks(clock: HandTurned, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[tuple[str, int, bool]] = []
    engine_thread = threading.current_thread()

    def note(hook: str, step: int) -> None:
        seen.append((hook, step, threading.current_thread() is engine_thread))

    def step_started(plan: Any) -> None:
        note("started", plan.state.step)
        clock.now += 0.002

    plugin = make_plugin(step_started=step_started, step_finished=lambda report: note("finished", report.state.step))
    bench = Bench(plugins=[plugin, make_plugin("quick", step_started=lambda plan: None)], budget=0.1)
    bench.add([1, 2, 3], 40)
    bench.finish()
    bench.plugins.stopped(Any, None)  # type: ignore[arg-type]  # nobody looks at the handle
    moved = 16
    assert [(hook, step) for hook, step, _ in seen] == [(hook, step) for step in range(1, 41) for hook in ("started", "finished")]
    assert [(hook, step) for hook, step, here in seen if here][-1] == ("started", moved)
    assert not any(here for hook, step, here in seen if step > moved or (step, hook) == (moved, "finished"))
    (message,) = [record.getMessage() for record in caplog.records]
    assert "'acme': minivllm_step_started is called on a thread of its own from now on (slow: 2.00 ms a call" in message
    assert bench.report().errors == ("step_started: slow: 2.00 ms a call, 1.00 ms are allowed",)
    assert bench.report("quick").errors == ()


def test_what_is_quick_enough_stays(clock: HandTurned) -> None:
    def step_started() -> None:
        clock.now += 0.0009

    bench = Bench(plugins=[make_plugin(step_started=step_started)], budget=0.1)
    bench.add([1, 2, 3], 60)
    bench.finish()
    assert bench.report().errors == ()
    assert bench.report().total_seconds == pytest.approx(60 * 0.0009)


def test_a_few_slow_calls_at_first_are_forgiven(clock: HandTurned) -> None:
    count = [0]

    def step_started() -> None:
        count[0] += 1
        clock.now += 0.004 if count[0] <= 3 else 0.0

    bench = Bench(plugins=[make_plugin(step_started=step_started)], budget=0.1)
    bench.add([1, 2, 3], 60)
    bench.finish()
    assert bench.report().errors == ()


@pytest.mark.parametrize(("pause", "is_out"), [(0.040, False), (0.400, True)])
def test_a_pause_now_and_then_is_the_machines_unless_it_is_long(clock: HandTurned, pause: float, is_out: bool) -> None:
    count = [0]

    def step_budget() -> None:
        count[0] += 1
        clock.now += 0.0001 if count[0] % 16 else pause

    bench = Bench(policies=[make_plugin(step_budget=step_budget)], budget=0.1)
    bench.add([1, 2, 3], 100)
    bench.finish()
    assert bool(bench.report().errors) == is_out


def test_nobody_is_called_slow_where_speed_is_not_judged(clock: HandTurned) -> None:
    def step_started() -> None:
        clock.now += 10.0

    bench = Bench(plugins=[make_plugin(step_started=step_started)])
    bench.add([1, 2, 3], 40)
    bench.finish()
    assert bench.report().errors == ()
    assert bench.report().total_seconds == pytest.approx(400)


def test_nobody_is_called_slow_while_errors_are_raised(clock: HandTurned) -> None:
    def step_started() -> None:
        clock.now += 10.0

    bench = Bench(plugins=[make_plugin(step_started=step_started)], budget=0.1, errors="raise")
    bench.add([1, 2, 3], 60)
    bench.finish()
    assert bench.report().errors == ()


@pytest.mark.parametrize(("share", "is_out"), [(0.1, True), (0.9, False)])
def test_the_budget_is_a_share_of_the_step(clock: HandTurned, share: float, is_out: bool) -> None:
    now = [0.0]

    def engine_clock() -> float:
        now[0] += 0.01  # every reading: a step is read five times, four of them around its parts
        return now[0]

    def step_budget() -> None:
        clock.now += 0.02

    bench = Bench(policies=[make_plugin(step_budget=step_budget)], budget=share, clock=engine_clock)
    bench.add([1, 2, 3], 40)
    bench.finish()
    assert bool(bench.report().errors) == is_out


def test_a_slow_policy_is_taken_out(clock: HandTurned, caplog: pytest.LogCaptureFixture) -> None:
    asked = [0]

    def step_budget() -> Budget:
        asked[0] += 1
        clock.now += 0.002
        return Budget(num_sequences=1)

    plans: list[Any] = []
    bench = Bench(
        plugins=[make_plugin("watch", step_started=plans.append)], policies=[make_plugin(step_budget=step_budget)], budget=0.1
    )
    for start in (1, 11, 21, 31):
        bench.add([start, start + 1], 20)
    bench.finish()
    bench.check_tokens()
    assert asked == [16]
    assert plans[15].state.num_running == 1
    assert plans[16].state.num_running == 4
    assert "too slow: 2.00 ms a call, 1.00 ms are allowed" in caplog.text


def test_the_time_of_a_slow_generator_is_its_policys(clock: HandTurned) -> None:
    def order_waiting(waiting: Any) -> Iterator[str]:
        for request in waiting:
            clock.now += 0.002
            yield request.request_id

    bench = Bench(policies=[make_plugin(order_waiting=order_waiting)], max_num_sequences=1, budget=0.1)
    for start in range(1, 600, 20):
        bench.add([start, start + 1], 1)
    bench.finish()
    assert bench.report().num_calls == 16
    assert "too slow" in bench.report().errors[0]


def test_a_slow_salt_is_never_taken_out(clock: HandTurned) -> None:
    def cache_salt(request: Any) -> str:
        clock.now += 1.0
        return str(request.tenant)

    bench = Bench(policies=[make_plugin(cache_salt=cache_salt)], budget=0.1)
    for number in range(40):
        seq = bench.add([1, 2, 3, 4, 5], 1, metadata={"tenant": str(number % 2)})
        bench.finish()
        assert seq.prompt_cached_tokens == (4 if number > 1 else 0)
    assert bench.report().errors == ()


def test_stopped_comes_after_everything_that_a_moved_observer_still_had_to_hear(clock: HandTurned) -> None:
    heard: list[str] = []
    gate = threading.Event()

    def step_finished(report: Any) -> None:
        clock.now += 0.005
        if report.state.step > 16:
            gate.wait(20)
        heard.append(f"step {report.state.step}")

    plugin = make_plugin(step_finished=step_finished, engine_stopped=lambda engine: heard.append("stopped"))
    llm, _ = scripted_llm(options={"plugins": [plugin]})
    assert len(llm.submit([1, 2, 3], SamplingParams(max_tokens=30, ignore_eos=True)).result().outputs[0].token_ids) == 30
    gate.set()
    llm.close()
    assert heard == [*(f"step {number}" for number in range(1, 31)), "stopped"]


def test_a_moved_observer_that_raises_is_taken_out_there(clock: HandTurned, caplog: pytest.LogCaptureFixture) -> None:
    count = [0]

    def step_started() -> None:
        clock.now += 0.002
        count[0] += 1
        if count[0] > 20:
            raise SystemExit(1)

    bench = Bench(plugins=[make_plugin(step_started=step_started)], budget=0.1)
    bench.add([1, 2, 3], 60)
    bench.finish()
    bench.plugins.stopped(Any, None)  # type: ignore[arg-type]  # nobody looks at the handle
    assert count == [25]
    assert bench.report().errors == ("step_started: 5 errors in a row",)
    assert caplog.text.count("Traceback") == 1


# --- queued observers ---------------------------------------------------------------------------------------------------


def test_a_queued_observer_drops_the_oldest_and_says_how_many() -> None:
    gate, began = threading.Event(), threading.Event()
    done: list[int] = []
    observer = QueuedObserver(maxsize=3)

    def job(number: int) -> None:
        began.set()
        gate.wait(20)
        done.append(number)

    observer.defer(job, 0)
    assert began.wait(20)
    for number in range(1, 8):
        observer.defer(job, number)
    assert observer.num_dropped == 4
    gate.set()
    observer.close()
    observer.close()
    assert done == [0, 5, 6, 7]


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(1)], ids=repr)
def test_a_job_that_raises_does_not_end_the_thread(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise error

    done: list[int] = []
    observer = QueuedObserver()
    observer.defer(fail)
    observer.defer(fail)
    observer.defer(done.append, 1)
    observer.close()
    assert done == [1]
    assert caplog.text.count("failed on its own thread") == 1
    assert observer._delivery.num_errors == 2
