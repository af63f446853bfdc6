"""Things named by ``"package.module:attribute"``, imported when they are first asked for."""

from importlib import import_module
from typing import Any

from minivllm_plugin.errors import ConfigError

__all__ = ["check_path", "import_path"]


def check_path(path: str, what: str) -> None:
    """Raise ConfigError unless ``path`` has the form of one. Imports nothing."""
    module, _, attribute = path.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), *attribute.split("."))):
        raise ConfigError(f"{what} must be given as 'package.module:name', got {path!r:.100}")


def import_path(path: str) -> Any:
    """What ``path`` names. Raises whatever its import raises, and AttributeError when the module has no such name."""
    module, _, attribute = path.partition(":")
    found: Any = import_module(module)
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
