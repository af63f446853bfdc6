"""``minivllm autoload``: whether a plain ``import litellm`` already knows our models."""

import importlib
from typing import Annotated, Literal

import typer

from minivllm_plugin.errors import UnsupportedFeatureError

__all__ = ["autoload"]

MODULE = "minivllm_adapters.autoload"  # loaded by name: this package must work without the adapters' frameworks


def autoload(action: Annotated[Literal["on", "off", "status"], typer.Argument(help="What to do.")] = "status") -> None:
    """Let a plain `import litellm` find minivllm/… models (a .pth file in this environment), or take that back."""
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise UnsupportedFeatureError(
            f"autoload needs {MODULE}, which does not import here ({error}); install minivllm-plugin[litellm] again"
        ) from error
    functions = {"on": module.enable, "off": module.disable, "status": module.status}
    print(functions[action]().explain())
