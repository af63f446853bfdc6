"""Named tensors in one file that is mapped, not read: pages come in when they are first used, and processes share them.

Why not safetensors: it aligns tensors to their element, and kernels that stream 64 bytes at a time lose a third of their
speed on rows that straddle cache lines. Layout: a JSON header padded to 4 KiB, then every tensor at a multiple of 4 KiB.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from minivllm_plugin.errors import ModelLoadError

__all__ = ["map_tensors", "write_tensors"]

MAGIC = b"MINIVLLM"
PAGE = 4096
DTYPES = {"uint8": torch.uint8, "float32": torch.float32, "bfloat16": torch.bfloat16}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write ``tensors`` (contiguous, on the CPU). The caller makes the file visible only when it is whole."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    entries: dict[str, dict[str, object]] = {}
    offsets: dict[str, int] = {}
    offset = 0
    for name, tensor in tensors.items():
        offsets[name] = offset
        entries[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "offset": offset}
        offset += -(-tensor.nbytes // PAGE) * PAGE
    header = json.dumps(entries).encode()
    start = -(-(len(MAGIC) + 8 + len(header)) // PAGE) * PAGE
    with path.open("wb") as file:
        file.write(MAGIC + start.to_bytes(8, "little") + header.ljust(start - len(MAGIC) - 8))
        for name, tensor in tensors.items():
            file.seek(start + offsets[name])
            # Not numpy's tofile: it says nothing when the last bytes find the disk full.
            file.write(tensor.view(-1).view(torch.uint8).numpy().data)
        file.truncate(start + offset)


def map_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, as private mappings.

    Raises:
        ModelLoadError: it is not such a file, or it is cut short.
    """
    try:
        data = np.memmap(path, dtype=np.uint8, mode="c")
        if bytes(data[: len(MAGIC)]) != MAGIC:
            raise ValueError("no tensor file")
        start = int.from_bytes(bytes(data[len(MAGIC) : len(MAGIC) + 8]), "little")
        entries = json.loads(bytes(data[len(MAGIC) + 8 : start]))
        whole = torch.from_numpy(data)
        return {name: _view(whole, start, **entry) for name, entry in entries.items()}
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as error:  # whatever damage may look like
        raise ModelLoadError(f"cannot read packed weights from {path}: {error}; delete the file to have it made again") from error


def _view(whole: Tensor, start: int, *, dtype: str, shape: list[int], offset: int) -> Tensor:
    if dtype not in DTYPES or offset < 0 or min(shape, default=0) < 0:
        raise ValueError(f"its header speaks of {dtype} {shape} at {offset}")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if start + offset + size > whole.numel():
        raise ValueError("the file is cut short")
    return whole[start + offset : start + offset + size].view(DTYPES[dtype]).view(shape)
