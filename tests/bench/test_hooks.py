"""What the hook benchmark measures, and that an engine with no plugin calls nothing. No figure is looked at."""

import json
import math
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import minivllm_plugin
from minivllm_plugin.bench import hook_scenarios, unplugged
from minivllm_plugin.bench.hook_scenarios import SCENARIOS, Scenario, plugins_for
from minivllm_plugin.bench.hooks import NO_PLUGIN, NO_SEAM, StepOf, measure_hooks
from minivllm_plugin.cli import main
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.hookspecs import OBSERVER_HOOKS, POLICY_HOOKS

PACKAGE = Path(minivllm_plugin.__file__).parent
STEP = StepOf(20.0, "a test")


@pytest.fixture(scope="module")
def report() -> Any:
    return measure_hooks(step=STEP, num_sequences=4, num_steps=40, repeat=2)


def test_every_hook_of_a_step_or_a_request_is_measured(report: Any) -> None:
    measured = {row["case"] for row in report.summary}
    for hook in (*OBSERVER_HOOKS, *POLICY_HOOKS):
        if hook != "minivllm_engine_error":  # called at most once in an engine's life
            assert hook.removeprefix("minivllm_") in measured
    for hook in OBSERVER_HOOKS:
        if hook != "minivllm_engine_error":
            assert f"{hook.removeprefix('minivllm_')} x3" in measured


def test_each_scenario_has_its_two_baselines(report: Any) -> None:
    for scenario in SCENARIOS:
        cases = [row["case"] for row in report.summary if row["scenario"] == scenario.name]
        assert cases[:2] == [NO_SEAM, NO_PLUGIN]
        assert len(cases) > 2


def test_rows_have_the_same_keys_and_finite_numbers(report: Any) -> None:
    read = json.loads(report.to_json(), parse_constant=pytest.fail)
    assert len({tuple(row) for row in read["summary"]}) == 1
    for row in read["summary"]:
        assert row["us"] > 0
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float))
        assert (row["percent_of_step"] is None) == (row["per"] == "request" or row["case"] == NO_SEAM)
    assert len(read["runs"]) == 2 * len(read["summary"])


def test_hooks_were_called_as_often_as_the_table_says(report: Any) -> None:
    calls = {(row["scenario"], row["case"]): row["calls"] for row in report.summary}
    assert calls["decode", "step_started"] == calls["decode", "step_finished"] == calls["decode", "step_budget"] == 1
    assert calls["decode", "step_finished x3"] == 3
    assert calls["requests", "admit"] == calls["requests", "request_queued"] == calls["requests", "request_finished"] == 1
    assert calls["64 waiting", "order_waiting"] == 1
    assert all(calls[key] > 0 for key in (("short of blocks", "select_victims"), ("full cache", "order_eviction")))
    assert all(number == 0 for (_, case), number in calls.items() if case in (NO_SEAM, NO_PLUGIN))


def test_shares_are_of_the_step_that_was_given(report: Any) -> None:
    for row in report.summary:
        if row["percent_of_step"] is not None:
            assert row["percent_of_step"] == pytest.approx(row["extra_us"] / (STEP.milliseconds * 1000) * 100, rel=0.06, abs=1e-9)
    idle = next(row for row in report.summary if row["case"] == NO_PLUGIN)
    assert report.facts["an engine with no plugin pays, % of that step"] == idle["percent_of_step"]


@pytest.mark.parametrize("settings", [{"num_sequences": 0}, {"num_steps": 0}, {"repeat": 0}, {"step": StepOf(0.0, "none")}])
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        measure_hooks(**{"step": STEP, **settings})


# --- scenarios: the same work, whoever watches ---------------------------------------------------------------------------


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_all_cases_of_a_scenario_do_the_same_work(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[list[tuple[str | None, int]]] = []

    def record(self: Any, seqs: list[Any], is_prefill: bool) -> list[int]:
        batches[-1].extend((seq.request_id, seq.num_scheduled_tokens) for seq in seqs)
        return [hook_scenarios.TOKEN] * len(seqs)

    monkeypatch.setattr(hook_scenarios.ConstantRunner, "run", record)
    given = [None, [], *(plugins_for(hook, 2 if hook in OBSERVER_HOOKS else 1) for hook in scenario.hooks)]
    for plugins in given:
        batches.append([])
        scenario.prepare(plugins, 4, 30).work()
    assert batches[0]
    assert all(batch == batches[0] for batch in batches)


# --- nothing is called -----------------------------------------------------------------------------------------------------


def calls_during(work: Callable[[], object]) -> Counter[str]:
    """Python functions of this package that ``work`` calls, as ``folder/file.py:name``."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            found[f"{path.relative_to(PACKAGE).as_posix()}:{frame.f_code.co_name}"] += 1

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def of_plugins(calls: Counter[str]) -> dict[str, int]:
    rooms = ("plugins/", "extensions/", "engine/steering.py", "views.py", "events.py")
    return {name: number for name, number in calls.items() if name.startswith(rooms)}


def decode(given: list[object] | None) -> Counter[str]:
    (scenario,) = [scenario for scenario in SCENARIOS if scenario.name == "decode"]
    return calls_during(scenario.prepare(given, 8, 50).work)


def test_a_step_with_no_plugin_calls_nothing_of_plugins() -> None:
    found = of_plugins(decode([]))
    assert found.pop("plugins/manager.py:is_calling", 0) <= 50  # whether a hook is running: one flag, once a step
    assert found == {}


def test_the_same_count_sees_what_a_plugin_costs() -> None:
    found = of_plugins(decode(plugins_for("minivllm_step_finished", 1)))
    assert found["plugins/calls.py:call"] == 50
    assert found["plugins/observation.py:step_finished"] == 50


def test_a_request_with_no_plugin_calls_nothing_of_plugins() -> None:
    (scenario,) = [scenario for scenario in SCENARIOS if scenario.name == "requests"]
    found = of_plugins(calls_during(scenario.prepare([], 8, 0).work))
    allowed = {"plugins/manager.py:is_calling", "plugins/manager.py:before_queueing"}
    assert set(found) <= allowed  # each one question, answered by a comparison with None


# --- the engine without its seam -----------------------------------------------------------------------------------------------


def test_every_part_of_the_engine_loses_its_questions() -> None:
    assert all(number > 0 for number in unplugged.num_questions().values())


def test_what_is_left_has_no_seam_and_is_not_the_engine() -> None:
    scheduler, engine = unplugged.unplugged_engine()
    assert scheduler is not Scheduler
    assert engine is not LLMEngine
    for function in (scheduler.schedule, scheduler._admit, engine.step):  # type: ignore[attr-defined]
        assert not set(function.__code__.co_names) & {"_steering", "_hooks", "_refuse_reentry", "clock"}


# --- the command ----------------------------------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "hooks", *arguments])
    out, err = capsys.readouterr()
    return int(caught.value.code or 0), out, err


def test_the_command_shows_a_table_and_writes_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "hooks.json"
    small = ("--n", "2", "--steps", "5", "--repeat", "1")
    code, out, err = run(capsys, "--step-ms", "10", *small, "--json", str(target))
    assert code == 0, err
    read = json.loads(target.read_text())
    assert read["benchmark"] == "hooks"
    assert read["settings"]["step"] == {"milliseconds": 10.0, "title": "a step as given"}
    assert all(row["case"] in out for row in read["summary"])
    assert "an engine with no plugin pays, % of that step" in out


def test_the_step_of_a_real_model_is_measured(tiny_model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from minivllm_kernels.dispatch import why_not

    if why_not("cpu", "cpu") is not None:
        pytest.skip("the CPU kernels cannot be used here")
    target = tmp_path / "hooks.json"
    small = (
        "--n",
        "2",
        "--steps",
        "5",
        "--repeat",
        "1",
        "--load-format",
        "dummy",
        "--max-model-len",
        "512",
        "--num-threads",
        "1",
    )
    code, _, err = run(capsys, "--model", tiny_model, *small, "--json", str(target))
    assert code == 0, err
    step = json.loads(target.read_text())["settings"]["step"]
    assert step["milliseconds"] > 0
    assert tiny_model in step["title"]


@pytest.mark.parametrize("value", ["0", "-3", "nan"])
def test_a_step_takes_time(capsys: pytest.CaptureFixture[str], value: str) -> None:
    code, _, err = run(capsys, "--step-ms", value)
    assert code == 1
    assert "must be greater than 0" in err
