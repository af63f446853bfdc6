"""``minivllm serve``: OpenAI's and Anthropic's APIs over HTTP. The server is the adapters' room; this reads the command line."""

import importlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from minivllm_plugin.cli import options as o
from minivllm_plugin.errors import ConfigError

__all__ = ["serve"]

MODULE = "minivllm_adapters.proxy"  # by name: this package must work without the adapters' frameworks
KEY_VARIABLE = "LITELLM_MASTER_KEY"
SERVER = "Server"

Models = Annotated[
    list[str],
    typer.Argument(help="Catalog names, hub ids, directories or .gguf files; NAME=MODEL serves one under another name."),
]
Host = Annotated[
    str, typer.Option("--host", help="Address to listen on; 0.0.0.0 lets other machines in.", rich_help_panel=SERVER)
]
Port = Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535, rich_help_panel=SERVER)]
MasterKey = Annotated[
    str | None,
    typer.Option(
        "--master-key",
        envvar=KEY_VARIABLE,
        help="What clients must send. Beyond loopback a random one is made if none is given.",
        show_default=False,
        show_envvar=True,
        rich_help_panel=SERVER,
    ),
]
MaxParallel = Annotated[
    int, typer.Option("--max-parallel", help="Requests at a time; one more gets 429.", min=1, rich_help_panel=SERVER)
]
MaxRequestMb = Annotated[
    float, typer.Option("--max-request-mb", help="MiB of a request's body; more gets 413.", rich_help_panel=SERVER)
]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds of a request that names none.", rich_help_panel=SERVER)]
Drain = Annotated[
    float, typer.Option("--drain-seconds", help="Requests in progress get so long when the server ends.", rich_help_panel=SERVER)
]
ConfigDir = Annotated[
    Path | None,
    typer.Option("--config-dir", help="Keep LiteLLM's configuration here instead of a temporary folder.", rich_help_panel=SERVER),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print LiteLLM's configuration and exit.", rich_help_panel=SERVER)
]
MaxSequences = Annotated[
    int | None, typer.Option("--max-num-sequences", help="Most that run at once.", min=1, rich_help_panel=o.ENGINE)
]
Quantization = Annotated[str, typer.Option("--quantization", help="auto, none, int8 or int4.", rich_help_panel=o.ENGINE)]


def serve(
    models: Models,
    host: Host = "127.0.0.1",
    port: Port = 4000,
    master_key: MasterKey = None,
    max_parallel: MaxParallel = 256,
    max_request_mb: MaxRequestMb = 10.0,
    timeout: Timeout = 600.0,
    drain_seconds: Drain = 30.0,
    config_dir: ConfigDir = None,
    print_config: PrintConfig = False,
    dtype: o.Dtype = "auto",
    quantization: Quantization = "auto",
    device: o.Device = "auto",
    load_format: o.LoadFormat = "auto",
    max_model_len: o.MaxModelLen = None,
    max_num_sequences: MaxSequences = None,
    num_blocks: o.NumBlocks = None,
    revision: o.Revision = None,
    plugin: o.Plugins = None,
    policy: o.Policies = None,
) -> None:
    """Serve models over HTTP with LiteLLM's proxy in this process: OpenAI's and Anthropic's APIs, /health and /metrics."""
    proxy = _proxy()
    has_metrics = proxy.has_metrics()
    makes_key = master_key is None and not proxy.is_loopback(host)
    settings = proxy.ProxySettings(
        models=_named(models),
        host=host,
        port=port,
        master_key=proxy.random_key() if makes_key else master_key,
        max_parallel=max_parallel,
        max_request_mb=max_request_mb,
        timeout=timeout,
        drain_seconds=drain_seconds,
        metrics=has_metrics,
    )
    if print_config:
        print(proxy.as_yaml(proxy.proxy_config(settings)), end="")
        return
    if not has_metrics:
        o.say('no /metrics: prometheus_client is not installed; pip install "minivllm-plugin[prometheus]"')
    given = {
        "dtype": dtype,
        "quantization": quantization,
        "device": device,
        "load_format": load_format,
        "max_model_len": max_model_len,
        "max_num_sequences": max_num_sequences,
        "num_blocks": num_blocks,
        "revision": revision,
        "plugins": plugin,
        "policies": policy,
    }
    options = {name: value for name, value in given.items() if value not in (None, [], "auto")}

    def announce(url: str) -> None:
        print(f"minivllm serve: {url}", flush=True)
        if makes_key:
            print(f"minivllm serve: master key, made for this run: {settings.master_key}", flush=True)
        o.say("Ctrl-C ends it")

    o.say(f"loading {', '.join(settings.models)} ...")
    proxy.ProxyServer(settings, options, folder=config_dir, announce=announce).run()


def _proxy() -> Any:
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise ConfigError(
            f"serving needs {MODULE}, which does not import here ({error}); install minivllm-plugin[serve]"
        ) from error


def _named(models: Sequence[str]) -> dict[str, str]:
    """Public name -> model. A path may hold an equals sign, a public name with a slash in front of it may not.

    Raises:
        ConfigError: a name is given twice.
    """
    named: dict[str, str] = {}
    for entry in models:
        name, equals, model = entry.partition("=")
        if not equals or "/" in name or os.sep in name or not name or not model:
            name = model = entry
        if name in named:
            raise ConfigError(f"model name {name!r} is given twice")
        named[name] = model
    return named
