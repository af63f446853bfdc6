"""``minivllm ui``: a chat page that shows the KV blocks live. The page is the ui room's; this only reads the command line."""

import importlib
from typing import Annotated, Any

import typer

from minivllm_plugin.cli import options as o
from minivllm_plugin.errors import ConfigError

__all__ = ["load_room", "ui"]

INSTALL = 'pip install "minivllm-plugin[ui]"'
QUESTION = "Say hello in one short sentence."


def ui(
    model: o.Model = "smollm2-135m",
    host: Annotated[str, typer.Option("--host", help="Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", help="0 takes a free one.", min=0, max=65535)] = 7860,
    num_blocks: Annotated[int, typer.Option("--num-blocks", help="KV cache blocks.", rich_help_panel=o.ENGINE, min=1)] = 512,
    policy: Annotated[str, typer.Option("--policy", help="fcfs, or a policy plugin.", rich_help_panel=o.ENGINE)] = "fcfs",
    auth: Annotated[str | None, typer.Option("--auth", help="USER:PASSWORD for the page and all it serves.")] = None,
    max_model_len: o.MaxModelLen = None,
    max_num_sequences: Annotated[
        int | None, typer.Option("--max-num-sequences", help="Most sequences at once.", rich_help_panel=o.ENGINE, min=1)
    ] = None,
    dtype: o.Dtype = "auto",
    device: o.Device = "auto",
    revision: o.Revision = None,
    check: Annotated[bool, typer.Option("--check", help="Answer one question over HTTP, print the answer, and exit.")] = False,
) -> None:
    """Chat in the browser and watch the KV blocks fill, be shared, stay reusable, and run out."""
    app = load_room("minivllm_ui.app")
    given = {
        "num_blocks": num_blocks,
        "max_model_len": max_model_len,
        "max_num_sequences": max_num_sequences,
        "dtype": dtype,
        "device": device,
        "revision": revision,
    }
    options = {name: value for name, value in given.items() if value is not None}
    credentials = _credentials(auth)
    o.say(f"loading {model} ...")
    server = app.PageServer(app.PageSettings(model=model, options=options, policy=policy, host=host, port=port, auth=credentials))
    if check:
        _check(server, credentials)
        return
    print(f"minivllm ui: {server.url}", flush=True)
    o.say("Ctrl-C ends it; `minivllm top URL` shows the same engine in a terminal")
    server.run()


def load_room(module: str) -> Any:
    """A module of the ui room, by name: this package must not know it.

    Raises:
        ConfigError: Gradio, or what else it needs, is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(f"the page needs {error.name!r}, which is not installed: {INSTALL}") from error


def _credentials(auth: str | None) -> tuple[str, str] | None:
    if auth is None:
        return None
    user, colon, password = auth.partition(":")
    if not user or not colon or not password:
        raise ConfigError("--auth wants USER:PASSWORD, both not empty")
    return user, password


def _check(server: Any, credentials: tuple[str, str] | None) -> None:
    server.start()
    try:
        answer = load_room("minivllm_ui.check").ask_over_http(server.url, QUESTION, credentials)
    finally:
        server.close()
    print(f"minivllm ui: {server.url} answered: {answer}")
