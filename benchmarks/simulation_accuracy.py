"""How well the simulator predicts this machine: tokens per second of the offline workload, measured and simulated.

    python benchmarks/simulation_accuracy.py --n 8 --n 32

Each round fits a cost model to steps of other prompts and other numbers of them, and then at once runs the workload of
``minivllm bench throughput`` on the engine and in the simulator, with the engine's own settings: the speed of a shared machine
moves from minute to minute, so neighbours in time are compared. ``off`` is simulated over measured, less 1, of the median round.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from op_timing import report_path

from minivllm_plugin.bench.report import Report, engine_title, median, significant
from minivllm_plugin.bench.table import show_report
from minivllm_plugin.bench.throughput import measure_throughput
from minivllm_plugin.bench.workload import LAST_TOKEN_ID, Workload, offline_workload
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.serving.llm import LLM
from minivllm_plugin.simulation import CostModel, Trace, TraceRequest, simulate
from minivllm_plugin.simulation.measuring import measure_cost_model


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    config = EngineConfig.from_options(options.model, _engine(options))
    runs: list[dict[str, Any]] = []
    title, settings = "", {}
    for number in range(options.rounds):
        cost = CostModel.load(options.cost_model) if options.cost_model else measure_cost_model(config)[0]
        with LLM(options.model, **_engine(options)) as llm:
            measured = measure_throughput(llm, sizes=options.n, repeat=options.repeat, prefill_tokens=0)
            title, settings, last, num_blocks = engine_title(llm), measured.settings, llm.vocab_size - 1, llm.num_blocks
        for size, figures in zip(options.n, measured.summary, strict=True):
            work = offline_workload(size, last_token_id=min(LAST_TOKEN_ID, last))
            runs.append(
                {
                    "case": figures["case"],
                    "round": number,
                    "measured": figures["out_tok_per_s"],
                    "simulated": predict(work, cost, config, num_blocks),
                    "cost_model": {name: getattr(cost, name) for name in CostModel.__dataclass_fields__},
                }
            )
    rows = [_summarise([run for run in runs if run["case"] == f"n={size}"]) for size in options.n]
    show_report(Report("simulation_accuracy", title, dict(settings), rows, runs), options.json)


def _summarise(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    off = [run["simulated"] / run["measured"] - 1 for run in runs]
    return {
        "case": runs[0]["case"],
        "measured_tok_per_s": significant(median([run["measured"] for run in runs])),
        "simulated_tok_per_s": significant(median([run["simulated"] for run in runs])),
        "off": significant(median(off), 3),
        "least_off": significant(min(off), 3),
        "most_off": significant(max(off), 3),
    }


def predict(work: Workload, cost: CostModel, config: EngineConfig, num_blocks: int) -> float:
    """Output tokens per second of all prompts sent at once."""
    lengths = zip(work.prompts, work.output_lengths, strict=True)
    trace = Trace(tuple(TraceRequest(0.0, len(prompt), output) for prompt, output in lengths))
    return simulate(
        trace,
        cost_model=cost,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_num_sequences=config.max_num_sequences,
        max_num_batched_tokens=config.max_num_batched_tokens,
        enable_chunked_prefill=config.enable_chunked_prefill,
    ).output_throughput


def _engine(options: argparse.Namespace) -> dict[str, Any]:
    # The simulator guesses no tokens, so neither does what it is compared with.
    return {"load_format": options.load_format, "max_model_len": options.max_model_len, "num_speculative_tokens": 0}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("model", nargs="?", default="smollm2-135m")
    made.add_argument("--n", type=int, action="append", help="prompts at once; may be repeated; default 8 and 32")
    made.add_argument("--rounds", type=int, default=3, help="fits, each followed by measured runs")
    made.add_argument("--repeat", type=int, default=1, help="measured runs of each in a round; their median counts")
    made.add_argument("--load-format", default="auto")
    made.add_argument("--max-model-len", type=int)
    made.add_argument("--cost-model", type=Path, help="a fitted one, instead of measuring it first")
    made.add_argument("--json", type=report_path, help="write the report here")
    options = made.parse_args(arguments)
    options.n = options.n or [8, 32]
    return options


if __name__ == "__main__":
    main()
