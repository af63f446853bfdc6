"""The ``minivllm`` command. This file owns the program: its commands, and how errors reach a person.

One module per command beside this one. Nothing heavy is imported before a command runs, so that help is instant.
"""

import os
import sys
import traceback
from typing import Annotated

import typer

from minivllm_plugin.cli.autoload import autoload
from minivllm_plugin.cli.bench import bench
from minivllm_plugin.cli.chat import chat
from minivllm_plugin.cli.environment import env
from minivllm_plugin.cli.generate import generate
from minivllm_plugin.cli.models import models, pull
from minivllm_plugin.cli.plugin_commands import with_plugin_commands
from minivllm_plugin.cli.plugins import plugins
from minivllm_plugin.cli.serve import serve
from minivllm_plugin.cli.simulate import simulate
from minivllm_plugin.cli.top import top
from minivllm_plugin.cli.ui import ui
from minivllm_plugin.errors import MinivllmError

__all__ = ["app", "main"]

DEBUG_FLAG = "--debug"

app = typer.Typer(
    name="minivllm",
    help="Run language models inside this process: chat, generate, pull models, look at plugins and the environment, measure.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # errors.py's messages are written for people; main() prints them
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (chat, generate, serve, ui, top, pull, models, plugins, env, autoload, simulate):
    app.command()(command)
app.add_typer(bench)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line. ``arguments`` default to the process's. Ends by SystemExit: 0, 1 (typed error), 2 (usage), 130.

    A typed error is one message on stderr; ``--debug`` anywhere before ``--`` adds the traceback.
    """
    given = sys.argv[1:] if arguments is None else list(arguments)
    end = given.index("--") if "--" in given else len(given)
    debug = DEBUG_FLAG in given[:end]
    given = [argument for argument in given[:end] if argument != DEBUG_FLAG] + given[end:]
    try:
        with_plugin_commands(app, given)(given)
    except MinivllmError as error:
        if debug:
            traceback.print_exc()
        print(f"minivllm: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # the reader (head, less) has gone; Python must not flush into it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _print_version(asked: bool) -> None:
    if not asked:
        return
    from importlib.metadata import version

    print(f"minivllm-plugin {version('minivllm-plugin')}")
    raise typer.Exit


@app.callback()
def _program(
    _version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
    _debug: Annotated[bool, typer.Option(DEBUG_FLAG, help="Show the traceback of an error; may stand anywhere.")] = False,
) -> None:
    """Run language models inside this process."""
