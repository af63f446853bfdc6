"""Commands that plugins add to ``minivllm``. Each plugin fills a program of its own, so that it can spoil nobody else's."""

import sys
from typing import Any

import typer
import typer.main

__all__ = ["with_plugin_commands"]


def with_plugin_commands(app: typer.Typer) -> Any:
    """``app`` as click runs it, with the commands of the installed plugins beside its own.

    A plugin that fails, or that takes a name that is there, is left out with one line on stderr.
    """
    from minivllm_plugin.extensions.contributions import implementations
    from minivllm_plugin.plugins.discovery import discover

    program: Any = typer.main.get_command(app)
    plugins = discover()
    for loaded in plugins:
        if loaded.error is not None:
            _say(loaded.title, loaded.error)
    for loaded, add in implementations("minivllm_register_commands", plugins):
        cli = typer.Typer(pretty_exceptions_enable=False)
        cli.callback()(_no_work)  # makes it a group even with one command
        try:
            add(cli)
            commands: dict[str, Any] = typer.main.get_command(cli).commands  # type: ignore[attr-defined]  # a group has them
        except Exception as error:  # a plugin's own code
            _say(loaded.title, f"{type(error).__name__}: {error}")
            continue
        for name, command in commands.items():
            if name in program.commands:
                _say(loaded.title, f"there is a command {name!r} already")
            else:
                program.add_command(command, name)
    return program


def _no_work() -> None:
    """Stands for the plugin's program; never run, since its commands move to ours."""


def _say(title: str, why: str) -> None:
    print(f"minivllm: commands of plugin {title} are missing: {why}", file=sys.stderr)
