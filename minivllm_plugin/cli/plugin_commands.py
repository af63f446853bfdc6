"""Commands that plugins add to ``minivllm``. Each plugin fills a program of its own, so that it can spoil nobody else's.

Plugins are loaded only for arguments that could mean them: a list of commands, or a word that is no command of ours. So our
own commands start as fast as without plugins.
"""

import sys
from collections.abc import Collection, Sequence
from typing import Any

import typer
import typer.main

__all__ = ["commands_of", "with_plugin_commands"]

PANEL = "Commands of plugins"


def with_plugin_commands(app: typer.Typer, arguments: Sequence[str] = ()) -> Any:
    """``app`` as click runs it, with the commands of the installed plugins beside its own if ``arguments`` may need them.

    A plugin that fails, or that takes a name that is there, is left out with one line on stderr.
    """
    program: Any = typer.main.get_command(app)
    if not _may_need_plugins(arguments, program.commands):
        return program
    from minivllm_plugin.extensions.contributions import implementations
    from minivllm_plugin.plugins.discovery import discover

    plugins = discover()
    for loaded in plugins:
        if loaded.error is not None:
            _say(loaded.title, loaded.error)
    for loaded, add in implementations("minivllm_register_commands", plugins):
        try:
            commands = commands_of(add)
        except Exception as error:  # a plugin's own code
            _say(loaded.title, f"{type(error).__name__}: {error}")
            continue
        for name, command in commands.items():
            if name in program.commands:
                _say(loaded.title, f"there is a command {name!r} already")
            else:
                command.rich_help_panel = PANEL
                program.add_command(command, name)
    return program


def commands_of(add: Any) -> dict[str, Any]:
    """Name -> command, as ``add`` (an implementation of ``minivllm_register_commands``) adds them. Raises whatever it raises."""
    cli = typer.Typer(pretty_exceptions_enable=False)
    cli.callback()(_no_work)  # makes it a group even with one command
    add(cli)
    return dict(typer.main.get_command(cli).commands)  # type: ignore[attr-defined]  # a group has them


def _may_need_plugins(arguments: Sequence[str], known: Collection[str]) -> bool:
    word = next((argument for argument in arguments if not argument.startswith("-")), None)
    return word not in known and "--version" not in arguments


def _no_work() -> None:
    """Stands for the plugin's program; never run, since its commands move to ours."""


def _say(title: str, why: str) -> None:
    print(f"minivllm: commands of plugin {title} are missing: {' '.join(why.split())}", file=sys.stderr)
