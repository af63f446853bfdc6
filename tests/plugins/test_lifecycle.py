"""What plugins hear of an engine's life, and what they may hold of it: started and stopped once, all of them, however it ends."""

import gc
import logging
import threading
import weakref
from typing import Any

import pytest
from plugin_bench import make_plugin, raising
from waiting import wait_until

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.errors import ConfigError, EngineClosedError, EngineDeadError, ModelLoadError, PluginError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.plugins.facade import ConfigDraft, EngineHandle
from minivllm_plugin.plugins.manager import EnginePlugins
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.serving.llm import LLM
from minivllm_plugin.serving.loading import Loaded
from minivllm_plugin.testing import scripted_llm

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


class Life:
    """Two plugins that write down their engine's life, one of them failing at every turn, with the failing one in between."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.heard: list[str] = []
        self.errors: list[BaseException | None] = []
        self.handles: list[EngineHandle] = []
        bad = {} if error is None else {hook: raising(error) for hook in ("engine_started", "engine_stopped", "engine_error")}
        self.plugins = [self._watcher("first"), *([make_plugin("bad", **bad)] if bad else []), self._watcher("last")]

    def _watcher(self, name: str) -> object:
        def engine_started(engine: EngineHandle) -> None:
            self.handles.append(engine)
            self.heard.append(f"{name} started")

        def engine_stopped(engine: EngineHandle, error: BaseException | None) -> None:
            assert engine is self.handles[0]
            self.errors.append(error)
            self.heard.append(f"{name} stopped")

        return make_plugin(
            name,
            engine_started=engine_started,
            engine_stopped=engine_stopped,
            engine_error=lambda error: self.heard.append(f"{name} error"),
            request_finished=lambda request, outcome: self.heard.append(f"{name} {request.request_id} {outcome.reason}"),
        )


STARTED = ["first started", "last started"]
STOPPED = ["first stopped", "last stopped"]
FAILURES = [None, RuntimeError("boom"), SystemExit(1)]


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_started_and_stopped_once_and_to_everybody(error: BaseException | None) -> None:
    life = Life(error)
    llm, _ = scripted_llm(options={"plugins": life.plugins})
    assert life.heard == STARTED
    llm.close()
    llm.close()
    assert life.heard == STARTED + STOPPED
    assert life.errors == [None, None]


@pytest.mark.parametrize("error", FAILURES, ids=repr)
def test_a_death_is_told_before_the_end(error: BaseException | None) -> None:
    life = Life(error)
    llm, _ = scripted_llm(options={"plugins": life.plugins}, fail_on_call=1)
    with pytest.raises(EngineDeadError):
        llm.submit([1, 2, 3], PARAMS).result(timeout=20)
    llm.close()
    assert life.heard == [*STARTED, "first error", "last error", *STOPPED]
    assert [str(cause) for cause in life.errors] == ["call 1 fails on purpose"] * 2


def test_an_engine_that_never_loaded_is_neither_started_nor_stopped() -> None:
    life = Life()

    def loader(config: EngineConfig) -> tuple[LLMEngine, Loaded]:
        raise ModelLoadError("no such file")

    with pytest.raises(ModelLoadError):
        LLM.from_loader(EngineConfig(plugins=tuple(life.plugins)), loader)
    assert life.heard == []


def test_a_plugin_that_raises_at_the_start_ends_a_strict_engine_and_the_others_are_told() -> None:
    life = Life(RuntimeError("boom"))
    with pytest.raises(PluginError, match="'bad' failed in minivllm_engine_started: RuntimeError: boom"):
        scripted_llm(options={"plugins": life.plugins, "plugin_errors": "raise"})
    assert life.heard == STARTED + STOPPED
    assert isinstance(life.errors[0], PluginError)


def test_a_strict_engine_closes_though_a_plugin_raises_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[str] = []
    plugins = [
        make_plugin("bad", engine_stopped=raising(RuntimeError("boom"))),
        make_plugin("good", engine_stopped=lambda engine: heard.append(engine.name)),
    ]
    llm, _ = scripted_llm(options={"plugins": plugins, "plugin_errors": "raise"})
    llm.close()
    assert heard == ["scripted"]
    assert "a plugin failed while engine 'scripted' stopped" in caplog.text


def test_requests_of_an_engine_that_is_closed_are_told_of_before_it_stops() -> None:
    life = Life()
    gate = threading.Event()
    llm, runner = scripted_llm(options={"plugins": life.plugins}, gate=gate)
    streams = [llm.submit([number, 2, 3], PARAMS, request_id=f"r{number}") for number in (1, 2)]
    assert runner.entered.wait(20)
    closing = threading.Thread(target=llm.close)
    closing.start()
    gate.set()
    closing.join()
    for stream in streams:
        with pytest.raises(EngineClosedError):
            stream.result(timeout=20)
    aborted = [f"{name} {request} abort" for request in ("r1", "r2") for name in ("first", "last")]
    assert sorted(life.heard[2:-2]) == sorted(aborted)
    assert life.heard[-2:] == STOPPED


def test_each_engine_has_a_life_of_its_own() -> None:
    started: list[EngineHandle] = []
    stopped: list[EngineHandle] = []
    plugin = make_plugin(engine_started=started.append, engine_stopped=stopped.append)
    first, _ = scripted_llm(options={"plugins": [plugin]})
    second, _ = scripted_llm(options={"plugins": [plugin]})
    second.close()
    assert stopped == [started[1]]
    assert first.submit([1, 2], PARAMS).result().outputs[0].token_ids
    first.close()
    assert stopped == [started[1], started[0]]


# --- the handle ---------------------------------------------------------------------------------------------------------


def test_a_plugin_that_keeps_its_handle_does_not_keep_the_engine() -> None:
    handles: list[EngineHandle] = []
    llm, runner = scripted_llm(options={"plugins": [make_plugin(engine_started=handles.append, step_started=lambda: None)]})
    assert llm.submit([1, 2, 3], PARAMS).result().outputs[0].token_ids
    service, kept = weakref.ref(llm._service), weakref.ref(runner)
    thread = llm._service._thread
    del llm, runner  # never closed: it closes itself
    gc.collect()
    thread.join(20)
    assert not thread.is_alive()
    gc.collect()
    wait_until(lambda: service() is None and kept() is None)
    handle = handles[0]
    assert handle.snapshot() is None
    handle.abort("anybody")
    assert handle.metrics() == []
    assert {total.hook for total in handle.plugin_totals()} == {"engine_started", "step_started"}


def test_the_handle_after_close_and_from_any_thread() -> None:
    handles: list[EngineHandle] = []
    llm, _ = scripted_llm(options={"plugins": [make_plugin(engine_started=handles.append)]})
    answers: list[Any] = []

    def use() -> None:
        answers.append((handles[0].snapshot(), handles[0].metrics(), handles[0].abort("nobody")))

    for _ in range(2):
        worker = threading.Thread(target=use)
        worker.start()
        worker.join()
        llm.close()
    assert [type(snapshot).__name__ for snapshot, *_ in answers] == ["EngineSnapshot"] * 2
    assert repr(handles[0]) == "EngineHandle('scripted')"


def test_a_metric_that_raises_is_left_out_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    handles: list[EngineHandle] = []

    def register_metrics(registry: Any) -> None:
        registry.gauge("bad", "always fails", raising(RuntimeError("boom"), "state"))
        registry.counter("good", "always 3", lambda state: 3)

    llm, _ = scripted_llm(options={"plugins": [make_plugin(engine_started=handles.append, register_metrics=register_metrics)]})
    with llm:
        for _ in range(3):
            assert [metric.name for metric in handles[0].metrics()] == ["good"]
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


# --- minivllm_configure -------------------------------------------------------------------------------------------------


def configured(change: Any, **options: Any) -> EngineConfig:
    plugins = EnginePlugins(EngineConfig(plugins=(make_plugin(configure=change),), **options), Extensions.builtin())
    return plugins.configure(EngineConfig(**options))


def test_the_draft_is_read_and_set() -> None:
    def change(config: ConfigDraft) -> None:
        config.max_num_sequences = config.max_num_sequences * 2
        config.chat_template = "{{ x }}"

    config = configured(change, max_num_sequences=5)
    assert (config.max_num_sequences, config.chat_template) == (10, "{{ x }}")


def set_to(name: str, value: object) -> Any:
    return lambda config: setattr(config, name, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            set_to("max_sequences", 3),
            "there is no engine setting 'max_sequences'; known are async_scheduling, block_plugins",
        ),
        (lambda config: config.max_sequences, "there is no engine setting 'max_sequences'"),
        (set_to("max_num_sequences", 0), "max_num_sequences must be an integer of at least 1, got 0"),
        (set_to("finished", 0), "there is no engine setting 'finished'"),
        (set_to("policies", ("sjf",)), "changes policies in minivllm_configure, when plugins are chosen already"),
        (set_to("plugin_errors", "raise"), "changes plugin_errors in minivllm_configure"),
        (raising(RuntimeError("boom"), "config"), "failed in minivllm_configure: RuntimeError: boom"),
        (raising(SystemExit(2), "config"), "failed in minivllm_configure: RuntimeError: it raised SystemExit"),
    ],
)
def test_a_draft_that_is_wrong_names_the_plugin(change: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configured(change)
    assert message in str(caught.value)
    assert "'acme'" in str(caught.value)


def test_nothing_is_left_running_by_a_plugin_that_refuses_the_configuration() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ConfigError):
        scripted_llm(options={"plugins": [make_plugin(configure=raising(RuntimeError("boom")))]})
    assert set(threading.enumerate()) <= before


def test_drafts_of_several_plugins_follow_each_other() -> None:
    def double(config: ConfigDraft) -> None:
        config.max_num_sequences *= 2

    llm, _ = scripted_llm(
        options={"plugins": [make_plugin("a", configure=double), make_plugin("b", configure=double)], "max_num_sequences": 3}
    )
    with llm:
        assert llm.config.max_num_sequences == 12
