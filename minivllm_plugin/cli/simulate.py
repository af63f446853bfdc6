"""``minivllm simulate``: a trace, an engine that is not there, and what would have become of the requests."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minivllm_plugin.bench.report import check_writable
from minivllm_plugin.cli import options as o
from minivllm_plugin.errors import ConfigError

if TYPE_CHECKING:
    from minivllm_plugin.simulation import CostModel, Trace

__all__ = ["simulate"]

TRACE = "Trace"
REPLICA = "Engine"
COST = "Cost model"

TraceFile = Annotated[
    str | None,
    typer.Argument(metavar="TRACE", help="A .csv or .jsonl file, or `synthetic` for a random trace.", show_default=False),
]
Policy = Annotated[
    list[str] | None, typer.Option("--policy", help="Scheduling policy (fcfs, priority, sjf, …); may be repeated.")
]
Compare = Annotated[str | None, typer.Option("--compare", metavar="A,B,…", help="One simulation each; join several by +.")]
Processes = Annotated[int, typer.Option("--processes", min=1, help="Simulations at a time, with --compare.")]
JsonFile = Annotated[Path | None, typer.Option("--json", help="Write all figures here.")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="Draw the comparison into this file.")]

Requests = Annotated[
    int | None, typer.Option("--requests", min=1, help="So many: the first, or the trace repeated.", rich_help_panel=TRACE)
]
RateScale = Annotated[float, typer.Option("--rate-scale", help="Let them arrive so many times as often.", rich_help_panel=TRACE)]
TimeUnit = Annotated[str | None, typer.Option("--time-unit", help="s or ms; else known from the columns.", rich_help_panel=TRACE)]
BlockTokens = Annotated[int | None, typer.Option("--block-tokens", min=1, help="Tokens of one hash id.", rich_help_panel=TRACE)]
SkipInvalid = Annotated[bool, typer.Option("--skip-invalid", help="Leave out unusable lines.", rich_help_panel=TRACE)]
WholeBlocks = Annotated[bool, typer.Option("--whole-blocks", help="Round prompts up to whole blocks.", rich_help_panel=TRACE)]
Rate = Annotated[float, typer.Option("--rate", help="synthetic: requests a second.", rich_help_panel=TRACE)]
Burstiness = Annotated[float, typer.Option("--burstiness", help="synthetic: 1 is Poisson, 0 regular.", rich_help_panel=TRACE)]
Prompt = Annotated[str, typer.Option("--prompt-tokens", help="synthetic: 200, uniform:32:256, …", rich_help_panel=TRACE)]
Output = Annotated[str, typer.Option("--output-tokens", help="synthetic: 64, lognormal:80:0.7, …", rich_help_panel=TRACE)]
Shared = Annotated[int, typer.Option("--shared-prefix", min=0, help="synthetic: common start.", rich_help_panel=TRACE)]
Turns = Annotated[int, typer.Option("--turns", min=1, help="synthetic: of a conversation.", rich_help_panel=TRACE)]
Tenants = Annotated[int, typer.Option("--tenants", min=1, help="synthetic: number of tenants.", rich_help_panel=TRACE)]
TraceSeed = Annotated[int, typer.Option("--seed", help="synthetic: of the draws.", rich_help_panel=TRACE)]

Replicas = Annotated[int, typer.Option("--replicas", min=1, help="Engines behind a router.", rich_help_panel=REPLICA)]
RouterName = Annotated[str, typer.Option("--router", help="round_robin, least_loaded, prefix_aware.", rich_help_panel=REPLICA)]
Blocks = Annotated[str | None, typer.Option("--blocks", help="KV blocks of each, or `unlimited`.", rich_help_panel=REPLICA)]
BlockSize = Annotated[int | None, typer.Option("--block-size", min=1, help="Tokens per block.", rich_help_panel=REPLICA)]
MaxSequences = Annotated[int, typer.Option("--max-sequences", min=1, help="Most that run at once.", rich_help_panel=REPLICA)]
BatchTokens = Annotated[int, typer.Option("--batch-tokens", min=1, help="Most tokens in a step.", rich_help_panel=REPLICA)]
NoCache = Annotated[bool, typer.Option("--no-prefix-cache", help="Share no prefixes.", rich_help_panel=REPLICA)]
NoChunks = Annotated[bool, typer.Option("--no-chunked-prefill", help="Alternate prefill and decode.", rich_help_panel=REPLICA)]
QueueSize = Annotated[int | None, typer.Option("--queue-size", min=0, help="Most that wait.", rich_help_panel=REPLICA)]
NoLeaps = Annotated[bool, typer.Option("--no-leaps", help="Run every step; the same result.", rich_help_panel=REPLICA)]

CostFile = Annotated[Path | None, typer.Option("--cost-model", help="A fitted one, as JSON.", rich_help_panel=COST)]
Measure = Annotated[
    str | None, typer.Option("--measure", metavar="MODEL", help="Run this model here and fit one.", rich_help_panel=COST)
]
SaveCost = Annotated[Path | None, typer.Option("--save-cost-model", help="Keep what was measured.", rich_help_panel=COST)]


def simulate(
    trace: TraceFile = None,
    policy: Policy = None,
    compare: Compare = None,
    processes: Processes = 1,
    json: JsonFile = None,
    html: HtmlFile = None,
    requests: Requests = None,
    rate_scale: RateScale = 1.0,
    time_unit: TimeUnit = None,
    block_tokens: BlockTokens = None,
    skip_invalid: SkipInvalid = False,
    whole_blocks: WholeBlocks = False,
    rate: Rate = 1.0,
    burstiness: Burstiness = 1.0,
    prompt_tokens: Prompt = "uniform:32:256",
    output_tokens: Output = "uniform:32:128",
    shared_prefix: Shared = 0,
    turns: Turns = 1,
    tenants: Tenants = 1,
    seed: TraceSeed = 0,
    replicas: Replicas = 1,
    router: RouterName = "round_robin",
    blocks: Blocks = None,
    block_size: BlockSize = None,
    max_sequences: MaxSequences = 64,
    batch_tokens: BatchTokens = 512,
    no_prefix_cache: NoCache = False,
    no_chunked_prefill: NoChunks = False,
    queue_size: QueueSize = None,
    no_leaps: NoLeaps = False,
    cost_model: CostFile = None,
    measure: Measure = None,
    save_cost_model: SaveCost = None,
    load_format: o.LoadFormat = "auto",
    max_model_len: o.MaxModelLen = None,
) -> None:
    """Run a trace through the real scheduler under a virtual clock; no model is needed, only the time of a step."""
    from minivllm_plugin.simulation.run import compare as run_all
    from minivllm_plugin.simulation.table import show_results

    for path in (json, html, save_cost_model):
        check_writable(path)
    if policy and compare:
        raise ConfigError("--policy and --compare both say what to simulate; join policies with + in --compare, such as lpm+slru")
    if trace is None and measure is None:
        raise ConfigError("give a trace (a .csv or .jsonl file, or `synthetic`), or --measure MODEL to fit a cost model alone")
    cost = _cost(cost_model, measure, save_cost_model, {"load_format": load_format, "max_model_len": max_model_len})
    if trace is None:
        return
    if trace == "synthetic":
        from minivllm_plugin.simulation.generator import generate_trace

        made = generate_trace(
            requests or 1000,
            rate=rate,
            burstiness=burstiness,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            shared_prefix_tokens=shared_prefix,
            turns=turns,
            tenants=tenants,
            seed=seed,
        )
    else:
        made = _read(trace, time_unit, block_tokens, skip_invalid, requests)
    names = compare.split(",") if compare else ["+".join(policy or ["fcfs"])]
    results = run_all(
        made.scaled(rate_scale),
        [name.strip() for name in names],
        cost,
        processes=processes,
        replicas=replicas,
        router=router,
        leap=not no_leaps,
        num_blocks=_blocks(blocks),
        block_size=block_size,
        max_num_sequences=max_sequences,
        max_num_batched_tokens=batch_tokens,
        enable_prefix_caching=not no_prefix_cache,
        enable_chunked_prefill=not no_chunked_prefill,
        max_queue_size=queue_size,
        whole_blocks=whole_blocks,
    )
    show_results(made, results)
    if json is not None:
        _write_json(json, results)
    if html is not None:
        from minivllm_plugin.simulation.page import render_page

        html.write_text(render_page(results), encoding="utf-8")
    for path in (json, html):
        if path is not None:
            o.say(f"written to {path}")


def _read(trace: str, time_unit: str | None, block_tokens: int | None, skip_invalid: bool, requests: int | None) -> "Trace":
    from minivllm_plugin.simulation.trace_files import read_trace

    if time_unit not in (None, "s", "ms"):
        raise ConfigError(f"--time-unit must be s or ms, got {time_unit!r}")
    made = read_trace(
        trace,
        time_unit="s" if time_unit == "s" else "ms" if time_unit == "ms" else None,
        block_tokens=block_tokens,
        skip_invalid=skip_invalid,
    )
    return made.resized(requests) if requests is not None else made


def _cost(path: Path | None, measure: str | None, save: Path | None, engine: dict[str, Any]) -> "CostModel":
    from minivllm_plugin.simulation.cost_model import CostModel

    if path is not None and measure is not None:
        raise ConfigError("--cost-model and --measure both give the cost model; use one")
    if save is not None and measure is None:
        raise ConfigError("--save-cost-model keeps what --measure MODEL finds; give that, too")
    if path is not None:
        return CostModel.load(path)
    if measure is None:
        return CostModel.illustrative()
    from minivllm_plugin.config import EngineConfig
    from minivllm_plugin.simulation.measuring import measure_cost_model
    from minivllm_plugin.simulation.table import show_cost_model

    cost, records = measure_cost_model(EngineConfig.from_options(measure, engine))
    show_cost_model(cost, len(records))
    if save is not None:
        cost.save(save)
        o.say(f"written to {save}")
    return cost


def _blocks(text: str | None) -> int | str | None:
    if text is None or text == "unlimited":
        return text
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--blocks must be a number of at least 1 or `unlimited`, got {text!r}") from None


def _write_json(path: Path, results: list[Any]) -> None:
    from json import dumps

    path.write_text(dumps({"format": 1, "results": [result.to_dict() for result in results]}, indent=2) + "\n", encoding="utf-8")
