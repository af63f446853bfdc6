"""Models in a hub repository, through ``huggingface_hub`` and its own cache (shared with transformers; it resumes by itself).

Only what we read is fetched: configuration, tokenizer, chat template and ``*.safetensors`` of the top directory. A complete
local snapshot is used as it is, without asking the network; an explicit pull asks for the newest.
"""

import errno
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minivllm_plugin.errors import ModelDownloadError
from minivllm_plugin.models.catalog import ModelSource

__all__ = ["fetch_snapshot", "find_snapshot", "missing_files"]

WANTED = [
    "config.json",
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template*",
    "*.safetensors",
    "*.safetensors.index.json",
    "1_Pooling/config.json",  # how embeddings are pooled
]
UNWANTED = ["[!1]*/*", "consolidated*"]  # all folders but 1_Pooling: other precisions and formats of the same weights
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def find_snapshot(source: ModelSource) -> Path | None:
    """A complete snapshot in the local hub cache, or None. Never touches the network."""
    try:
        path = _snapshot(source, local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if missing_files(path) else path


def fetch_snapshot(source: ModelSource, *, progress: bool = True) -> Path:
    """Bring the newest snapshot of the revision here and return its directory.

    Raises:
        ModelDownloadError: offline, unreachable, unknown, gated, no space, or a repository without the files we read. Names
            the repository, the file that was wanted and the ways to provide it.
    """
    try:
        options: dict[str, Any] = {} if progress and sys.stderr.isatty() else {"tqdm_class": _silent_bar()}
        path = _snapshot(source, local_files_only=False, **options)
    except (OSError, ValueError) as error:
        local = find_snapshot(source)  # older hub clients give up although everything is there
        if local is not None and not _full_disk(error):
            return local
        raise ModelDownloadError(_explain(source, error)) from error
    missing = missing_files(path)
    if missing and _is_offline():  # the client returns what it has
        raise ModelDownloadError(_explain(source, FileNotFoundError(missing[0])))
    missing = [name for name in missing if name not in TOKENIZER_FILES]  # some repositories have none: ids still work
    if missing:
        raise ModelDownloadError(
            f"{_label(source)} has no {missing[0]} (or the hub could not be reached and the local copy is incomplete). Name a "
            f"repository with config.json and *.safetensors weights. {_ways(source)}"
        )
    return path


def missing_files(directory: Path) -> list[str]:
    """What a model directory lacks: configuration, weights (every shard its index names), tokenizer. Empty when complete."""
    missing = [] if (directory / "config.json").is_file() else ["config.json"]
    missing += [name for name in _weight_files(directory) if not (directory / name).is_file()]
    if not any((directory / name).is_file() for name in TOKENIZER_FILES):
        missing.append(TOKENIZER_FILES[0])
    return missing


def _weight_files(directory: Path) -> list[str]:
    index = directory / INDEX
    if index.is_file():
        try:
            weight_map: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return [f"{INDEX} (readable)"]
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    return found or ["model.safetensors"]


def _snapshot(source: ModelSource, *, local_files_only: bool, **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    path = snapshot_download(
        source.location,
        revision=source.revision,
        allow_patterns=WANTED,
        ignore_patterns=UNWANTED,
        local_files_only=local_files_only,
        **options,
    )
    return Path(str(path))


def _silent_bar() -> type[Any]:
    from huggingface_hub.utils.tqdm import tqdm

    base: Any = tqdm

    class SilentBar(base):  # type: ignore[misc]  # the hub's class has no types
        """A bar that never draws: output that is not a terminal gets no control characters."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})

    return SilentBar


def _is_offline() -> bool:
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def _full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _explain(source: ModelSource, error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if _full_disk(error):
        return (
            f"the disk of {constants.HF_HUB_CACHE!r} is full: {_label(source)} does not fit. Free some space or set HF_HOME to a "
            "directory on a larger disk"
        )
    if isinstance(error, GatedRepoError):
        reason = "is gated: accept its licence on the hub and set HF_TOKEN to a token of that account"
    elif isinstance(error, RepositoryNotFoundError):
        reason = "does not exist, or is private (then set HF_TOKEN)"
    elif isinstance(error, RevisionNotFoundError):
        reason = f"has no revision {source.revision!r}"
    elif _is_offline():
        reason = "is not complete in the local hub cache, and HF_HUB_OFFLINE forbids to fetch it"
    else:
        first_line = (str(error).strip().splitlines() or [""])[0][:300]
        reason = f"could not be reached ({type(error).__name__}: {first_line})"
    return f"{_label(source)} {reason}. Wanted: config.json, tokenizer.json, *.safetensors. {_ways(source)}"


def _label(source: ModelSource) -> str:
    return f"hub repository {source.location!r}" + (f" at {source.revision!r}" if source.revision else "")


def _ways(source: ModelSource) -> str:
    return (
        f"Ways to provide it: a network (and HF_TOKEN where needed) and `minivllm pull {source.name}`; a directory with those "
        "files, by its path; or another model: smollm2-135m needs no hub, `minivllm models` lists all"
    )
