"""What plugins cost: the engine's Python around a step with no plugin, with observers of each kind, with each policy.

One process, one thread, a runner that answers at once; timed is the CPU time of that thread, which others on the machine
disturb least. Cases take turns, and each is compared with an engine without the seam in the same round. Garbage collection is
off meanwhile.
"""

import gc
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from minivllm_plugin.bench.hook_scenarios import SCENARIOS, Scenario, plugins_for
from minivllm_plugin.bench.report import Report, median, significant
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.hookspecs import POLICY_HOOKS

__all__ = ["NO_PLUGIN", "NO_SEAM", "StepOf", "measure_hooks", "step_of_model"]

NO_SEAM = "without the seam"
NO_PLUGIN = "no plugin"
NUMBERS_OF_OBSERVERS = (1, 3)


class StepOf(NamedTuple):
    """The step that costs are a share of: how long it takes, and whose it is."""

    milliseconds: float
    title: str


class _Case(NamedTuple):
    scenario: Scenario
    name: str
    hook: str | None
    num_plugins: int


class _Run(NamedTuple):
    seconds: float
    units: int
    calls: int


def measure_hooks(*, step: StepOf, num_sequences: int = 32, num_steps: int = 200, repeat: int = 30) -> Report:
    """Time every case ``repeat`` times, and compare.

    Args:
        step: of a real model with ``num_sequences`` decoding.
        num_steps: timed steps of a run.

    Raises:
        ConfigError: an argument is less than 1, or the step takes no time.
    """
    for name, value in (("num_sequences", num_sequences), ("num_steps", num_steps), ("repeat", repeat)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1")
    if not step.milliseconds > 0:
        raise ConfigError(f"step_ms={step.milliseconds} must be greater than 0")
    cases = _cases()
    gc.freeze()  # what the process held before is not looked through before every run
    try:
        _round(cases, num_sequences, min(num_steps, 20))  # unmeasured: imports, caches
        rounds = [_round(cases, num_sequences, num_steps) for _ in range(repeat)]
    finally:
        gc.unfreeze()
    summary = [_row(case, rounds, step) for case in cases]
    runs = [
        {"round": index, "scenario": case.scenario.name, "case": case.name, **one[case]._asdict()}
        for index, one in enumerate(rounds)
        for case in cases
    ]
    idle = next(row for row in summary if row["case"] == NO_PLUGIN and row["scenario"] == "decode")
    facts = {
        f"step of {step.title}, ms": significant(step.milliseconds),
        "an engine with no plugin pays, % of that step": idle["percent_of_step"],
    }
    settings = {"num_sequences": num_sequences, "num_steps": num_steps, "repeat": repeat, "step": step._asdict()}
    return Report("hooks", f"{num_sequences} sequences, scripted runner", settings, summary, runs, facts)


def step_of_model(model: str, settings: dict[str, Any], *, num_sequences: int = 32) -> StepOf:
    """The median step of a real model in which ``num_sequences`` decode, on this machine now.

    Raises:
        UnsupportedFeatureError, ModelError: it cannot be measured here.
    """
    from minivllm_plugin.bench.step import measure_steps
    from minivllm_plugin.config import EngineConfig

    report = measure_steps(EngineConfig.from_options(model, settings), num_sequences=num_sequences, repeat=1)
    (whole,) = [row["median_ms"] for row in report.summary if row["part"] == "whole step"]
    return StepOf(whole, report.title)


def _cases() -> list[_Case]:
    cases = []
    for scenario in SCENARIOS:
        cases += [_Case(scenario, NO_SEAM, None, 0), _Case(scenario, NO_PLUGIN, None, 0)]
        for hook in scenario.hooks:
            short = hook.removeprefix("minivllm_")
            numbers = (1,) if hook in POLICY_HOOKS else NUMBERS_OF_OBSERVERS
            cases += [_Case(scenario, short if count == 1 else f"{short} x{count}", hook, count) for count in numbers]
    return cases


def _round(cases: Sequence[_Case], num_sequences: int, num_steps: int) -> dict[_Case, _Run]:
    return {case: _run(case, num_sequences, num_steps) for case in cases}


def _run(case: _Case, num_sequences: int, num_steps: int) -> _Run:
    given = None if case.name == NO_SEAM else plugins_for(case.hook, case.num_plugins) if case.hook else []
    prepared = case.scenario.prepare(given, num_sequences, num_steps)
    before = _num_calls(prepared.plugins)
    gc.collect()
    gc.disable()
    try:
        began = time.thread_time()
        units = prepared.work()
        seconds = time.thread_time() - began
    finally:
        gc.enable()
    return _Run(seconds, units, _num_calls(prepared.plugins) - before)


def _num_calls(plugins: Any) -> int:
    return 0 if plugins is None else sum(report.num_calls for report in plugins.reports())


def _row(case: _Case, rounds: Sequence[dict[_Case, _Run]], step: StepOf) -> dict[str, Any]:
    """Medians over the rounds; what a case costs is compared within each round."""
    baseline = _Case(case.scenario, NO_SEAM, None, 0)
    taken = median([1e6 * one[case].seconds / one[case].units for one in rounds])
    extra = median([1e6 * (one[case].seconds / one[case].units - one[baseline].seconds / one[baseline].units) for one in rounds])
    calls = rounds[0][case].calls / rounds[0][case].units
    is_baseline = case.name == NO_SEAM
    is_step = case.scenario.unit == "step"
    return {
        "scenario": case.scenario.name,
        "case": case.name,
        "per": case.scenario.unit,
        "us": significant(taken),
        "calls": significant(calls),
        "extra_us": None if is_baseline else significant(extra, 3),
        "extra_us_a_call": significant(extra / calls, 3) if calls else None,
        "percent_of_step": significant(extra / (10 * step.milliseconds), 2) if is_step and not is_baseline else None,
    }
