"""``minivllm top``: the page's engine panel in a terminal, for people on ssh. The picture is made in the ui room."""

import os
from typing import Annotated

import typer

from minivllm_plugin.cli.ui import load_room

__all__ = ["top"]


def top(
    url: Annotated[str, typer.Argument(help="Of a page that `minivllm ui` serves.")] = "http://127.0.0.1:7860/",
    auth: Annotated[
        str | None, typer.Option("--auth", help="USER:PASSWORD of the page; or set MINIVLLM_UI_AUTH.", show_default=False)
    ] = None,
    interval: Annotated[float, typer.Option("--interval", help="Seconds between looks.", min=0.1, max=60)] = 0.5,
    once: Annotated[bool, typer.Option("--once", help="Print one picture and exit.")] = False,
) -> None:
    """Watch a running page's engine in the terminal: pool, queues, sequences, events."""
    load_room("minivllm_ui.top").watch(url, auth or os.environ.get("MINIVLLM_UI_AUTH"), interval=interval, once=once)
