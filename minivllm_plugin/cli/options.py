"""Options that several commands share, and what they become: an LLM and its SamplingParams."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from minivllm_plugin import LLM
    from minivllm_plugin.sampling_parameters import SamplingParams

__all__ = [
    "Device",
    "Dtype",
    "IgnoreEos",
    "IncludeStop",
    "LoadFormat",
    "MaxModelLen",
    "MaxTokens",
    "MinP",
    "MinTokens",
    "Model",
    "NumBlocks",
    "Plugins",
    "Policies",
    "Revision",
    "Seed",
    "Stop",
    "StopTokenId",
    "System",
    "Temperature",
    "TopK",
    "TopP",
    "open_llm",
    "sampling_params",
    "say",
]

SAMPLING = "Sampling"
ENGINE = "Engine"

Model = Annotated[str, typer.Argument(help="Catalog name, hub id, model directory or .gguf file; see `minivllm models`.")]
System = Annotated[str | None, typer.Option("--system", help="System prompt.")]

MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Most tokens to generate.", rich_help_panel=SAMPLING)]
MinTokens = Annotated[int | None, typer.Option("--min-tokens", help="No end before this many tokens.", rich_help_panel=SAMPLING)]
Temperature = Annotated[float | None, typer.Option("--temperature", "-t", help="0 is greedy.", rich_help_panel=SAMPLING)]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the k likeliest tokens; 0 keeps all.", rich_help_panel=SAMPLING)]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens up to p.", rich_help_panel=SAMPLING)]
MinP = Annotated[float | None, typer.Option("--min-p", help="Drop tokens below p times the likeliest.", rich_help_panel=SAMPLING)]
Seed = Annotated[int | None, typer.Option("--seed", help="The same seed gives the same tokens.", rich_help_panel=SAMPLING)]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="Stop string; may be repeated.", rich_help_panel=SAMPLING)]
StopTokenId = Annotated[
    list[int] | None, typer.Option("--stop-token-id", help="Token that ends; may be repeated.", rich_help_panel=SAMPLING)
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past end tokens.", rich_help_panel=SAMPLING)]
IncludeStop = Annotated[bool, typer.Option("--include-stop", help="Keep the stop string in the text.", rich_help_panel=SAMPLING)]

Dtype = Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.", rich_help_panel=ENGINE)]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, …", rich_help_panel=ENGINE)]
MaxModelLen = Annotated[int | None, typer.Option("--max-model-len", help="Context window in tokens.", rich_help_panel=ENGINE)]
NumBlocks = Annotated[int | None, typer.Option("--num-blocks", help="KV cache blocks to allocate.", rich_help_panel=ENGINE)]
LoadFormat = Annotated[str, typer.Option("--load-format", help="auto, or dummy: random weights.", rich_help_panel=ENGINE)]
Revision = Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit on the hub.", rich_help_panel=ENGINE)]

Plugins = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin", metavar="NAME", help="Load this plugin; may be repeated. See `minivllm plugins`.", rich_help_panel=ENGINE
    ),
]
Policies = Annotated[
    list[str] | None,
    typer.Option("--policy", metavar="NAME", help="Let this plugin steer; the first is asked first.", rich_help_panel=ENGINE),
]


def open_llm(model: str, **options: Any) -> "LLM":
    """Load a model for one command; options that are None or empty lists keep the engine's defaults. The caller closes it."""
    from minivllm_plugin import LLM

    if sys.stderr.isatty():
        say(f"loading {model} ...")
    return LLM(model, **{name: value for name, value in options.items() if value not in (None, [])})


def sampling_params(llm: "LLM", **given: Any) -> "SamplingParams":
    """The model's own defaults, overridden by what the user gave; None and empty lists mean not given."""
    return llm.default_sampling_params().replace(**{name: value for name, value in given.items() if value not in (None, [])})


def say(line: str) -> None:
    """A remark to the person, apart from the output: on stderr, dimmed on a terminal."""
    from rich.console import Console

    Console(stderr=True, soft_wrap=True).print(line, style="dim", markup=False, highlight=False)
