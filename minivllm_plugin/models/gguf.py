"""A GGUF file becomes a Hugging Face directory, once. Every later start reads that directory like any other.

The result is keyed by the file's real path, size and modification time and by :data:`VERSION`. It appears whole or not at
all: one process writes (a file lock), the others wait, and the finished directory is renamed into place.
"""

import errno
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from minivllm_plugin.errors import ModelLoadError
from minivllm_plugin.models.progress import announce

__all__ = ["VERSION", "convert"]

logger = logging.getLogger(__name__)

VERSION = 1
"""Of what is written. Raise it when the same GGUF would give other files: old conversions are then not used."""

SPARE_BYTES = 64 * 2**20  # tokenizer files and the file system's own
SAMPLING_KEYS = {"temperature": "temp", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}


def convert(gguf_path: Path, cache_root: Path) -> Path:
    """The directory made of ``gguf_path``: config.json, model.safetensors, tokenizer files, generation_config.json.

    Quantised tensors are stored as float32, F16 and BF16 as they are. ``cache_root`` is created when missing.

    Raises:
        ModelLoadError: the file is missing, truncated or corrupt, or the cache cannot be written (disk full); named.
        UnsupportedModelError: an architecture, type or tokenizer that is not supported; named.
    """
    home = cache_root / _key(gguf_path)
    target = home / "model"
    if target.is_dir():
        return target
    from minivllm_plugin.models.storage import exclusive, partial_directory

    waiting = f"another process is converting {gguf_path}; waiting for it"
    with _explained(home), exclusive(home, on_wait=lambda: logger.info(waiting)):
        if not target.is_dir():
            with partial_directory(home) as scratch:
                work = scratch / "model"
                work.mkdir()
                _write(gguf_path, work)
                work.rename(target)
    return target


def _key(path: Path) -> str:
    """Name and identity of the file: another file under the same name has another key."""
    try:
        real = path.resolve(strict=True)
        status = real.stat()
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    identity = f"{real}\n{status.st_size}\n{status.st_mtime_ns}\n{VERSION}"
    return f"{real.stem}-{hashlib.sha256(os.fsencode(identity)).hexdigest()[:16]}"


def _write(gguf_path: Path, directory: Path) -> None:
    """Check everything that can be checked from the header, then write the five files."""
    from minivllm_plugin.models.gguf_config import hf_config
    from minivllm_plugin.models.gguf_file import GGUFFile
    from minivllm_plugin.models.gguf_tokenizer import read_tokenizer
    from minivllm_plugin.models.gguf_weights import plan_conversion, write_safetensors

    announce(f"converting {gguf_path.name} (once) ...", enabled=True)
    file = GGUFFile(gguf_path)
    config = hf_config(file)
    plan = plan_conversion(file, config)
    _check_complete(gguf_path, config, {entry.name: entry.tensor.shape for entry in plan})
    needed = sum(entry.num_bytes for entry in plan) + SPARE_BYTES
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ModelLoadError(
            f"converting {gguf_path} takes {needed:,} bytes in {directory.parent}, only {free:,} are free; {_REMEDY}"
        )
    tokens = read_tokenizer(file.metadata)
    ids = {"eos_token_id": list(tokens.eos_token_ids), "bos_token_id": tokens.bos_token_id, "pad_token_id": tokens.pad_token_id}
    ids = {name: value for name, value in ids.items() if value not in (None, [])}
    write_safetensors(plan, directory / "model.safetensors")
    (directory / "tokenizer.json").write_text(tokens.tokenizer.to_str(), encoding="utf-8")
    _write_json(directory / "tokenizer_config.json", tokens.config)
    _write_json(directory / "generation_config.json", {**ids, **_sampling(file.metadata)})
    _write_json(directory / "config.json", {**config, **ids})


def _check_complete(path: Path, config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> None:
    """Every parameter of the architecture has its tensor, in its shape: said of the GGUF, before anything is written."""
    import torch

    from minivllm_plugin.models import architecture_class
    from minivllm_plugin.models.config import ModelConfig
    from minivllm_plugin.models.layers import parameter_sources

    # One position: the rotary table is not what is checked here, and a corrupt context length could ask for any size.
    parsed = replace(ModelConfig.from_hf(config), max_position_embeddings=1)
    with torch.device("meta"):
        module = architecture_class(parsed.architecture)(parsed)
    for source in parameter_sources(module):
        for part in source.parts or source.whole:
            name, wanted = part.tensor, list(part.shape)
            if name not in shapes:
                raise ModelLoadError(f"{path} lacks the tensor for {name!r}: the file is incomplete")
            if list(shapes[name]) != wanted:
                found = list(shapes[name])
                raise ModelLoadError(f"the tensor for {name!r} in {path} has shape {found}, but the metadata asks for {wanted}")


def _sampling(metadata: Mapping[str, Any]) -> dict[str, float]:
    found = {name: metadata.get(f"general.sampling.{key}") for name, key in SAMPLING_KEYS.items()}
    return {name: value for name, value in found.items() if value is not None}


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


_REMEDY = "free some space, or set MINIVLLM_CACHE to a directory on another disk"


@contextmanager
def _explained(home: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        remedy = _REMEDY if full else "make it writable, or set MINIVLLM_CACHE to a directory that is"
        raise ModelLoadError(f"cannot write the converted model to {home}: {error}; {remedy}") from error
