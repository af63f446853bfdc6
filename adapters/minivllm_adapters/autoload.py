"""Opt-in: make plain ``import litellm`` know ``minivllm/…`` in every Python of this environment. Behind ``minivllm autoload``.

LiteLLM has no plugin discovery, so the only way is a ``.pth`` file: Python runs such a file's ``import`` lines at each start.
Ours is one line that installs an import hook (see :mod:`minivllm_adapters.autoload_hook`) and swallows every error, also that
our package is gone. Nothing else is changed, and removing the file removes everything. Python started with ``-S``, and folders
that are no site directory (``pip install --target``, ``PYTHONPATH``), do not read such files.

The same mechanism has been abused by malware (a tampered LiteLLM release of March 2026), so scanners may point at the file.
It is therefore never installed by default, its content is this module's ``LINE`` and can be read at a glance.
"""

import contextlib
import os
import site
import sysconfig
import tempfile
from dataclasses import dataclass
from pathlib import Path

from minivllm_adapters import autoload_hook
from minivllm_adapters.errors import AutoloadError

__all__ = ["LINE", "AutoloadStatus", "disable", "enable", "status"]

# Site files are read in the order of their names; an editable install adds our folders to sys.path by such a file too.
FILE_NAME = "zz_minivllm_autoload.pth"
LINE = (
    'import sys; exec("try:\\n from minivllm_adapters.autoload_hook import install\\n install()\\nexcept Exception:\\n pass")'
    "  # written by `minivllm autoload on`; `minivllm autoload off` removes it\n"
)


@dataclass(frozen=True, slots=True)
class AutoloadStatus:
    """What is on disk and in this process.

    Attributes:
        path: where the file is, or would be.
        enabled: the file is there, with exactly our line.
        foreign: something else is there under that name.
        read_at_start: Python reads ``.pth`` files of that folder.
        hooked: this process waits for LiteLLM to be imported.
    """

    path: Path
    enabled: bool
    foreign: bool
    read_at_start: bool
    hooked: bool

    def explain(self) -> str:
        """The same in plain sentences, for people."""
        if self.foreign:
            return f"off: {self.path} exists, but is not the file that `minivllm autoload on` writes; look at it and move it away"
        if not self.enabled:
            return f"off: there is no {self.path}; call minivllm_plugin.register() before using minivllm/… models in LiteLLM"
        unread = "" if self.read_at_start else "; but Python does not read .pth files in that folder, so it has no effect"
        return (
            f"on: {self.path} holds one line that Python runs at each start. It installs an import hook; when LiteLLM is "
            f"imported, the hook registers the minivllm provider. Nothing else is changed, errors are ignored, "
            f"{autoload_hook.SWITCH}=0 switches it off for one process, `minivllm autoload off` removes the file{unread}"
        )


def status(directory: Path | None = None) -> AutoloadStatus:
    """Look, change nothing. ``directory`` defaults to this environment's ``site-packages``."""
    path = _path(directory)
    try:
        content = path.read_text("utf-8")
    except FileNotFoundError:
        content = None
    except (OSError, UnicodeDecodeError):
        content = ""
    return AutoloadStatus(
        path=path,
        enabled=content == LINE,
        foreign=content is not None and content != LINE,
        read_at_start=_is_site_directory(path.parent),
        hooked=autoload_hook.installed(),
    )


def enable(directory: Path | None = None) -> AutoloadStatus:
    """Write the file; a second time does nothing. Takes effect in the Pythons that start afterwards.

    Raises:
        AutoloadError: the folder cannot be written, is no site directory, or holds another file of that name.
    """
    before = status(directory)
    if before.foreign:
        raise AutoloadError(f"{before.path} exists and is not ours; move it away, then try again")
    if not before.read_at_start:
        raise AutoloadError(f"Python reads no .pth files in {before.path.parent}; use a virtual environment, or call register()")
    if not before.enabled:
        _write(before.path)
    return status(directory)


def disable(directory: Path | None = None) -> AutoloadStatus:
    """Remove the file, and the hook from this process; a second time does nothing.

    Raises:
        AutoloadError: the file cannot be removed, or is not ours.
    """
    before = status(directory)
    if before.foreign:
        raise AutoloadError(f"{before.path} is not ours and stays; look at it and remove it yourself")
    try:
        before.path.unlink(missing_ok=True)
    except OSError as error:
        raise AutoloadError(f"cannot remove {before.path}: {error.strerror}; remove it with the rights of its owner") from error
    autoload_hook.uninstall()
    return status(directory)


def _path(directory: Path | None) -> Path:
    return Path(sysconfig.get_path("purelib") if directory is None else directory) / FILE_NAME


def _is_site_directory(directory: Path) -> bool:
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    for folder in folders:
        with contextlib.suppress(OSError):
            if os.path.samefile(folder, directory):
                return True
    return False


def _write(path: Path) -> None:
    """Whole or not at all: a half-written line would print an error at each start of Python."""
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".minivllm-autoload-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(LINE)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        where = f"cannot write {path}: {error.strerror}"
        raise AutoloadError(f"{where}; use a virtual environment that you own, or call minivllm_plugin.register()") from error
