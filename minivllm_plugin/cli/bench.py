"""``minivllm bench …``: how fast the engine is on this machine. Options become engine settings; the measuring is bench/'s."""

from pathlib import Path
from typing import Annotated, Any

import typer

from minivllm_plugin.bench.report import check_writable
from minivllm_plugin.bench.table import show_report
from minivllm_plugin.cli import options as o
from minivllm_plugin.errors import ConfigError

__all__ = ["bench", "hooks", "latency", "prefix", "startup", "step", "throughput"]

bench = typer.Typer(
    name="bench", help="Measure this machine: throughput, latency, startup, prefix cache, parts of a step, plugins."
)

Model = Annotated[str, typer.Argument(help="Catalog name, hub id, model directory or .gguf file.")]
Quantization = Annotated[str, typer.Option("--quantization", help="auto, none, int8 or int4.", rich_help_panel=o.ENGINE)]
CacheDtype = Annotated[str, typer.Option("--kv-cache-dtype", help="auto, float32, bfloat16 or int8.", rich_help_panel=o.ENGINE)]
Threads = Annotated[int | None, typer.Option("--num-threads", help="Of the CPU kernels.", rich_help_panel=o.ENGINE)]
Guesses = Annotated[
    int | None,
    typer.Option(
        "--num-speculative-tokens",
        min=0,
        help="Most that prompt lookup guesses of one request; 0: none.",
        rich_help_panel=o.ENGINE,
    ),
]
Json = Annotated[Path | None, typer.Option("--json", help="Write machine, versions, settings and every run here.")]
Repeat = Annotated[int, typer.Option("--repeat", min=1, help="Runs of each case; medians are shown.")]
WorkloadSeed = Annotated[int, typer.Option("--seed", help="Of the workload.")]
Sizes = Annotated[str, typer.Option("--n", metavar="N,N,…", help="Numbers of prompts sent at once.")]
Requests = Annotated[int, typer.Option("--requests", min=1, help="Requests in all.")]


@bench.command()
def throughput(
    model: Model = "smollm2-135m",
    n: Sizes = "1,8,32",
    prefill: Annotated[int, typer.Option("--prefill", min=0, help="Length of the prompt that times prefill; 0: none.")] = 512,
    repeat: Repeat = 3,
    seed: WorkloadSeed = 0,
    json: Json = None,
    dtype: o.Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    num_threads: Threads = None,
    num_speculative_tokens: Guesses = None,
    device: o.Device = "auto",
    load_format: o.LoadFormat = "auto",
    max_model_len: o.MaxModelLen = None,
    plugin: o.Plugins = None,
    policy: o.Policies = None,
) -> None:
    """Tokens per second: N prompts of 32-256 random tokens at once, 32-128 new tokens each; a single one is 32 in, 128 out."""
    sizes = _numbers(n)
    check_writable(json)
    from minivllm_plugin.bench.throughput import measure_throughput

    settings = _engine(
        dtype, quantization, kv_cache_dtype, num_threads, device, load_format, max_model_len, num_speculative_tokens
    )
    with o.open_llm(model, **settings, plugins=plugin, policies=policy) as llm:
        report = measure_throughput(llm, sizes=sizes, repeat=repeat, prefill_tokens=prefill, seed=seed)
    show_report(report, json)


@bench.command()
def latency(
    model: Model = "smollm2-135m",
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Clients at once.")] = 8,
    requests: Requests = 32,
    long_prompt: Annotated[int, typer.Option("--long-prompt", min=1, help="Tokens of the one that arrives among them.")] = 1024,
    repeat: Repeat = 3,
    seed: WorkloadSeed = 0,
    json: Json = None,
    dtype: o.Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    num_threads: Threads = None,
    num_speculative_tokens: Guesses = None,
    device: o.Device = "auto",
    load_format: o.LoadFormat = "auto",
    max_model_len: o.MaxModelLen = None,
    plugin: o.Plugins = None,
    policy: o.Policies = None,
) -> None:
    """Time to the first token and between tokens, as readers see it; also while a long prompt arrives."""
    check_writable(json)
    from minivllm_plugin.bench.latency import measure_latency

    settings = _engine(
        dtype, quantization, kv_cache_dtype, num_threads, device, load_format, max_model_len, num_speculative_tokens
    )
    with o.open_llm(model, **settings, plugins=plugin, policies=policy) as llm:
        report = measure_latency(
            llm, concurrency=concurrency, num_requests=requests, long_prompt=long_prompt, repeat=repeat, seed=seed
        )
    show_report(report, json)


@bench.command()
def startup(
    model: Model = "smollm2-135m",
    repeat: Repeat = 5,
    json: Json = None,
    dtype: o.Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    num_threads: Threads = None,
    device: o.Device = "auto",
    load_format: o.LoadFormat = "auto",
    max_model_len: o.MaxModelLen = None,
) -> None:
    """From a fresh process to the first token, files cached: one unmeasured start comes first."""
    check_writable(json)
    from minivllm_plugin.bench.startup import measure_startup

    settings = _engine(dtype, quantization, kv_cache_dtype, num_threads, device, load_format, max_model_len)
    show_report(measure_startup(model, settings, repeat=repeat), json)


@bench.command()
def prefix(
    model: Model = "smollm2-135m",
    requests: Requests = 32,
    shared: Annotated[int, typer.Option("--shared", min=1, help="Tokens that all prompts begin with.")] = 1000,
    own: Annotated[int, typer.Option("--own", min=1, help="Further tokens of each prompt.")] = 32,
    output: Annotated[int, typer.Option("--output", min=1, help="New tokens of each.")] = 32,
    repeat: Repeat = 3,
    seed: WorkloadSeed = 0,
    json: Json = None,
    dtype: o.Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    num_threads: Threads = None,
    device: o.Device = "auto",
    load_format: o.LoadFormat = "auto",
    max_model_len: o.MaxModelLen = None,
) -> None:
    """Requests that share a prefix: nothing shared, shared from cold, shared with a warm cache."""
    check_writable(json)
    from minivllm_plugin.bench.prefix import measure_prefix

    settings = _engine(dtype, quantization, kv_cache_dtype, num_threads, device, load_format, max_model_len)
    with o.open_llm(model, **settings) as llm:
        report = measure_prefix(llm, num_requests=requests, shared=shared, own=own, output=output, repeat=repeat, seed=seed)
    show_report(report, json)


@bench.command()
def step(
    model: Model = "smollm2-135m",
    n: Annotated[int, typer.Option("--n", min=1, help="Requests that decode at once.")] = 32,
    output: Annotated[int, typer.Option("--output", min=2, help="New tokens of each.")] = 128,
    stream: Annotated[bool, typer.Option("--stream", help="Read every token, as a server does.")] = False,
    repeat: Repeat = 3,
    seed: WorkloadSeed = 0,
    json: Json = None,
    dtype: o.Dtype = "auto",
    quantization: Quantization = "auto",
    kv_cache_dtype: CacheDtype = "auto",
    num_threads: Threads = None,
    device: o.Device = "auto",
    load_format: o.LoadFormat = "auto",
    max_model_len: o.MaxModelLen = 2048,
) -> None:
    """The parts of a decode step in kernels and in Python, and the process's memory."""
    check_writable(json)
    from minivllm_plugin.bench.step import measure_steps
    from minivllm_plugin.config import EngineConfig

    settings = _engine(dtype, quantization, kv_cache_dtype, num_threads, device, load_format, max_model_len)
    config = EngineConfig.from_options(model, settings)
    show_report(measure_steps(config, num_sequences=n, output=output, stream=stream, repeat=repeat, seed=seed), json)


@bench.command()
def hooks(
    model: Annotated[str, typer.Option("--model", help="Whose step the costs are compared with; it is run.")] = "smollm2-135m",
    step_ms: Annotated[
        float | None, typer.Option("--step-ms", help="How long that step takes, in milliseconds, instead of running it.")
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Requests that decode at once.")] = 32,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Timed steps of a run.")] = 200,
    repeat: Annotated[int, typer.Option("--repeat", min=1, help="Runs of each case; medians are shown.")] = 30,
    json: Json = None,
    load_format: o.LoadFormat = "auto",
    num_threads: Threads = None,
    max_model_len: o.MaxModelLen = 2048,
) -> None:
    """What plugins cost: none, observers of each kind, each policy; in microseconds and in % of a model's decode step."""
    check_writable(json)
    from minivllm_plugin.bench.hooks import StepOf, measure_hooks, step_of_model

    if step_ms is not None:
        step = StepOf(step_ms, "a step as given")
    else:
        settings = _engine("auto", "auto", "auto", num_threads, "auto", load_format, max_model_len)
        step = step_of_model(model, settings, num_sequences=n)
    show_report(measure_hooks(step=step, num_sequences=n, num_steps=steps, repeat=repeat), json)


def _engine(
    dtype: str,
    quantization: str,
    kv_cache_dtype: str,
    num_threads: int | None,
    device: str,
    load_format: str,
    max_model_len: int | None,
    num_speculative_tokens: int | None = None,
) -> dict[str, Any]:
    given = {
        "dtype": dtype,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "num_threads": num_threads,
        "device": device,
        "load_format": load_format,
        "max_model_len": max_model_len,
        "num_speculative_tokens": num_speculative_tokens,
    }
    return {name: value for name, value in given.items() if value is not None}


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise ConfigError(f"--n {text!r} must be numbers of at least 1 with commas between them, such as 1,8,32")
    return numbers
