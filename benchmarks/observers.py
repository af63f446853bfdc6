"""What the first-party observers cost a step: the engine's Python around a step of 32 decoding sequences, with each of them.

    python benchmarks/observers.py --step-ms 13.8 --json observers.json

One process, a scripted runner that answers at once, CPU time of the engine's thread; work that a plugin does on a thread of its
own is told apart. Cases take turns; medians of the rounds. ``--step-ms`` is what a step of the model takes: the share is of it.
"""

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from op_timing import report_path

from minivllm_plugin.bench.hook_scenarios import SCENARIOS
from minivllm_plugin.bench.report import Report, significant
from minivllm_plugin.bench.table import show_report
from minivllm_plugin.plugins.facade import EngineHandle
from minivllm_plugin.plugins.first_party.kv_events import KVEventPublisher
from minivllm_plugin.plugins.first_party.otel import RequestSpans
from minivllm_plugin.plugins.first_party.prometheus import PrometheusMetrics
from minivllm_plugin.plugins.first_party.trace import TraceRecorder


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, required=True, help="milliseconds of a step of the model (minivllm bench step)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", type=report_path)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        makers: dict[str, Callable[[], list[object]]] = {
            "no plugin": list,
            "prometheus": lambda: [PrometheusMetrics()],
            "kv-events": lambda: [KVEventPublisher()],
            "trace": lambda: [TraceRecorder(str(Path(folder) / f"trace-{time.monotonic_ns()}.json"))],
            "otel": lambda: [RequestSpans()],
        }
        rounds = [{name: _run(make(), options.steps) for name, make in makers.items()} for _ in range(options.repeat)]
    summary = []
    for name in makers:
        thread, others = (median(one[name][place] - one["no plugin"][place] for one in rounds) for place in (0, 1))
        summary.append(
            {
                "plugin": name,
                "us_a_step": significant(thread * 1e6),
                "percent_of_step": significant(100 * thread * 1e3 / options.step_ms),
                "us_on_other_threads": significant(others * 1e6),
            }
        )
    settings = {"num_sequences": 32, "step_ms": options.step_ms, "num_steps": options.steps, "repeat": options.repeat}
    runs = [
        {"round": index, "plugin": name, "thread": a, "others": b}
        for index, one in enumerate(rounds)
        for name, (a, b) in one.items()
    ]
    show_report(Report("observers", "32 decoding sequences, scripted runner", settings, summary, runs), options.json)


def _run(plugins: list[object], num_steps: int) -> tuple[float, float]:
    """CPU seconds a step: of the engine's thread, and of all others."""
    for plugin in plugins:
        plugin.minivllm_name = "measured"  # type: ignore[attr-defined]  # plugins of known names are left out of these scenarios
    decode = next(scenario for scenario in SCENARIOS if scenario.name == "decode")
    prepared = decode.prepare(plugins, 32, num_steps)
    assert prepared.plugins is not None
    handle = EngineHandle("scripted", lambda: None, lambda request_id: None, list)
    prepared.plugins.started(handle)
    gc.collect()
    gc.disable()
    try:
        began, process = time.thread_time(), time.process_time()
        steps = prepared.work()
        thread = time.thread_time() - began
        time.sleep(0.05)  # for threads that are behind
        whole = time.process_time() - process
    finally:
        gc.enable()
        prepared.plugins.stopped(handle, None)
    return thread / steps, (whole - thread) / steps


if __name__ == "__main__":
    main()
