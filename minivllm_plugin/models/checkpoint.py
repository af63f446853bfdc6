"""A directory of safetensors read as one checkpoint, and the proof that it fills a model exactly.

The index decides which files count; without one, ``model.safetensors`` does; without either, every ``*.safetensors`` if no
two of them hold the same tensor. Everything is checked from the headers before the first weight is read, so the outcome
never depends on the order of a directory listing and a bad checkpoint fails fast. Of a model that several ranks share, each
reads its own part of a tensor.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from minivllm_plugin.errors import ModelLoadError, UnsupportedModelError
from minivllm_plugin.models.layers import ParameterSource, TensorSlice, parameter_sources

__all__ = ["Checkpoint", "TensorTable", "fill_parameters", "open_checkpoint", "read_json", "stacked"]

logger = logging.getLogger(__name__)

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
NAMES_OF_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
# Tensors that old exports carry and that a model computes or shares by itself.
SKIPPED_SUFFIXES = (".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")
NAMED_IN_MESSAGES = 5


class Checkpoint:
    """Tensors by name over open, memory-mapped files. Made by :func:`open_checkpoint`, valid inside its block."""

    def __init__(self, directory: Path, readers: dict[str, Any], files: dict[str, str]) -> None:
        self.directory = directory
        self.files = files
        """Tensor name -> name of the file that holds it."""
        self._readers = readers

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """safetensors' name of the type, for example ``BF16``."""
        return str(self._slice(name).get_dtype())

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file: copy it before the block ends."""
        with self._explained(name):
            tensor: Tensor = self._readers[self.files[name]].get_tensor(name)
        return tensor

    def part(self, wanted: TensorSlice) -> Tensor:
        """A part of one tensor; no more of the file is read. Copy it before the block ends."""
        if wanted.is_whole:
            return self.tensor(wanted.tensor)
        index = (*(slice(None),) * wanted.dim, slice(wanted.start, wanted.stop))
        with self._explained(wanted.tensor):
            tensor: Tensor = self._slice(wanted.tensor)[index]
        return tensor

    def path(self, name: str) -> Path:
        return self.directory / self.files[name]

    def _slice(self, name: str) -> Any:
        return self._readers[self.files[name]].get_slice(name)

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        try:
            yield
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"cannot read tensor {name!r} from {self.path(name)}: {error}") from error


class TensorTable(Checkpoint):
    """The same over tensors in memory, which a plugin's reader made. ``source``: what to call them in messages."""

    def __init__(self, directory: Path, tensors: Mapping[str, Tensor], source: str) -> None:
        super().__init__(directory, {}, dict.fromkeys(tensors, source))
        self._tensors = tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        dtype = self._tensors[name].dtype
        return NAMES_OF_DTYPES.get(dtype, str(dtype))

    def tensor(self, name: str) -> Tensor:
        return self._tensors[name]

    def part(self, wanted: TensorSlice) -> Tensor:
        return wanted.of(self._tensors[wanted.tensor])


@contextmanager
def open_checkpoint(directory: Path) -> Iterator[Checkpoint]:
    """The checkpoint in ``directory``.

    Raises:
        ModelLoadError: no weights, a missing or truncated file, or an index that does not match its files.
    """
    index = directory / INDEX_NAME
    weight_map = _weight_map(index) if index.is_file() else None
    names = sorted(set(weight_map.values())) if weight_map is not None else _files_without_index(directory)
    with ExitStack() as stack:
        readers = {name: stack.enter_context(_open(directory / name, listed=weight_map is not None)) for name in names}
        held = {name: set(reader.keys()) for name, reader in readers.items()}
        if weight_map is None:
            files = _disjoint(directory, held)
        else:
            files = weight_map
            for tensor, file in weight_map.items():
                if tensor not in held[file]:
                    raise ModelLoadError(f"{directory / file} does not hold {tensor!r}, which {INDEX_NAME} says it does")
        yield Checkpoint(directory, readers, files)


def fill_parameters(
    model: nn.Module, checkpoint: Checkpoint, *, dtype: torch.dtype, device: torch.device, tied: bool, report: bool = True
) -> None:
    """Give every parameter of ``model`` (built on ``meta``) its values, in ``dtype`` on ``device``. Each is copied once.

    Args:
        tied: the checkpoint's output layer, if it has one, is the embedding's.
        report: log the tensors that nothing takes. Several ranks read one checkpoint; the first one has a use for all of them.

    Raises:
        ModelLoadError: a parameter has no tensor, or one of another shape.
        UnsupportedModelError: a tensor is not of floating point (a quantised checkpoint).
    """
    planned = [(source, _slices_for(source, checkpoint)) for source in parameter_sources(model)]
    missing = [source for source, slices in planned if not slices]
    if missing:
        raise ModelLoadError(_missing_message(missing, checkpoint))
    for _, slices in planned:
        _check(slices, checkpoint)
    if report:
        _report_unused({part.tensor for _, slices in planned for part in slices}, checkpoint, tied)
    for source, slices in planned:
        source.set(stacked((checkpoint.part(part) for part in slices), source.parameter.shape, dtype, device))


def stacked(parts: Iterable[Tensor], shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of ``shape`` with ``parts`` stacked along dimension 0, and zeros below them."""
    values = torch.empty(shape, dtype=dtype, device=device)
    rows = 0
    for part in parts:
        values[rows : rows + part.shape[0]].copy_(part)
        rows += part.shape[0]
    values[rows:].zero_()
    return values


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelLoadError naming the file when it is missing, unreadable or no object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index} has no 'weight_map' of tensor names to file names")
    for tensor, file in weight_map.items():
        if not isinstance(file, str) or not file or Path(file).name != file:
            raise ModelLoadError(f"{index} maps {tensor!r} to {file!r}, which is not the name of a file beside it")
    return weight_map


def _files_without_index(directory: Path) -> list[str]:
    if (directory / SINGLE_NAME).is_file():
        return [SINGLE_NAME]
    names = sorted(path.name for path in directory.glob("*.safetensors"))
    if names:
        return names
    others = sorted(path.name for path in directory.glob("*.bin"))
    hint = f"; {others[0]} is a pickle, which is not read: convert it to safetensors" if others else ""
    raise ModelLoadError(f"{directory} holds no *.safetensors{hint}")


@contextmanager
def _open(path: Path, *, listed: bool) -> Iterator[Any]:
    if listed and not path.is_file():
        raise ModelLoadError(f"missing shard {path}: {INDEX_NAME} names it; fetch it again")
    try:
        opened = safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelLoadError(f"{path} is truncated or corrupt ({error}); fetch it again") from error
    with opened as reader:
        yield reader


def _disjoint(directory: Path, held: dict[str, set[str]]) -> dict[str, str]:
    files: dict[str, str] = {}
    for file, tensors in held.items():
        twice = sorted(tensors & files.keys())
        if twice:
            raise ModelLoadError(
                f"{directory} has no {INDEX_NAME}, and both {files[twice[0]]} and {file} hold {twice[0]!r}: "
                "add the index, or remove the files that do not belong to the model"
            )
        files.update(dict.fromkeys(tensors, file))
    return files


def _slices_for(source: ParameterSource, checkpoint: Checkpoint) -> tuple[TensorSlice, ...]:
    """What makes up the parameter, stacked by rows; empty when it is not all there."""
    if source.tensor in checkpoint.files:
        return source.whole
    return source.parts if all(part.tensor in checkpoint.files for part in source.parts) else ()


def _check(slices: tuple[TensorSlice, ...], checkpoint: Checkpoint) -> None:
    for name, shape in {part.tensor: part.shape for part in slices}.items():
        if checkpoint.shape(name) != shape:
            raise ModelLoadError(
                f"tensor {name!r} in {checkpoint.path(name)} has shape {list(checkpoint.shape(name))}, "
                f"but config.json asks for {list(shape)}"
            )
        if checkpoint.dtype(name) not in FLOAT_DTYPES:
            raise UnsupportedModelError(
                f"tensor {name!r} in {checkpoint.path(name)} has type {checkpoint.dtype(name)}; "
                f"supported are {', '.join(FLOAT_DTYPES)} (unquantised weights)"
            )


def _missing_message(missing: list[ParameterSource], checkpoint: Checkpoint) -> str:
    wanted: list[str] = []
    for source in missing:
        wanted += [part.tensor for part in source.parts if part.tensor not in checkpoint.files] or [source.tensor]
    has_index = (checkpoint.directory / INDEX_NAME).is_file()
    where = INDEX_NAME if has_index else ", ".join(sorted(set(checkpoint.files.values()))) or "the files"
    return f"{where} in {checkpoint.directory} lacks {_some(wanted)}: the checkpoint is incomplete or not of this architecture"


def _report_unused(used: set[str], checkpoint: Checkpoint, tied: bool) -> None:
    unused = [
        name
        for name in sorted(checkpoint.files.keys() - used)
        if not name.endswith(SKIPPED_SUFFIXES) and not (tied and name == "lm_head.weight")
    ]
    if unused:
        logger.warning("%s: ignored tensors that this architecture has no place for: %s", checkpoint.directory, _some(unused))


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    rest = len(listed) - NAMED_IN_MESSAGES
    return ", ".join(map(repr, listed[:NAMED_IN_MESSAGES])) + (f" and {rest} more" if rest > 0 else "")
