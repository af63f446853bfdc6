"""The container format GGUF (versions 2 and 3, little endian): metadata by key, tensors by name, as the file has them.

Reads the header in one pass over the mapped file; the reader in the ``gguf`` package builds numpy views of every single
string of the vocabulary, which takes seconds. Types, block sizes and dequantisation are that package's. Nothing here knows
of architectures. Every length is checked against the file, so that a truncated file is named as such.
"""

import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from numpy.typing import NDArray

from minivllm_plugin.errors import ModelLoadError, UnsupportedModelError

__all__ = ["GGUFFile", "GGUFTensor"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}
RAW_TYPES = (GGMLQuantizationType.F32, GGMLQuantizationType.F16, GGMLQuantizationType.BF16)
QUANTISED_TYPES = (
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q6_K,
)


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor in the file.

    Attributes:
        shape: outermost dimension first, as torch has it (the file stores it reversed).
        rows: bytes as uint8 ``[product of outer dimensions, bytes of one row]``, a view of the mapped file.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    rows: NDArray[np.uint8]

    @property
    def is_raw(self) -> bool:
        """Whether the bytes are plain F32, F16 or BF16."""
        return self.type in RAW_TYPES


class GGUFFile:
    """An open file. ``metadata`` maps keys to str, bool, int, float or lists of them; ``tensors`` names to tensors.

    Raises:
        ModelLoadError: not a GGUF, truncated or corrupt.
        UnsupportedModelError: a version, or a tensor of a type, that is not read here; named.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if path.stat().st_size < len(MAGIC):
                    raise ModelLoadError(f"{path} is not a GGUF file: it has {path.stat().st_size} bytes")
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelLoadError(f"cannot read {path}: {error}") from error
        self._size, self._position = len(self._data), 0
        num_tensors, num_keys = self._preamble()
        self.metadata: dict[str, Any] = dict(self._key_and_value() for _ in range(num_keys))
        self.tensors: dict[str, GGUFTensor] = {}
        for tensor in self._read_tensors(num_tensors):
            if tensor.name in self.tensors:
                raise self._corrupt(f"tensor {tensor.name!r} stands there twice")
            self.tensors[tensor.name] = tensor

    def _preamble(self) -> tuple[int, int]:
        if self._take(4) != MAGIC:
            raise ModelLoadError(f"{self.path} is not a GGUF file: it does not start with {MAGIC.decode()}")
        version = self._unpack("<I")
        if version not in VERSIONS:
            swapped = version & 0xFFFF == 0  # a small number seen from the wrong end
            detail = "big endian" if swapped else f"version {version}"
            raise UnsupportedModelError(f"{self.path} is GGUF {detail}; supported are versions 2 and 3, little endian")
        return self._unpack("<Q"), self._unpack("<Q")

    def _key_and_value(self) -> tuple[str, Any]:
        key = self._string()
        return key, self._value(self._value_type())

    def _value(self, kind: GGUFValueType) -> Any:
        if kind == GGUFValueType.STRING:
            return self._string()
        if kind != GGUFValueType.ARRAY:
            return self._unpack(SCALARS[kind])
        element, count = self._value_type(), self._unpack("<Q")
        if element in SCALARS:
            size = struct.calcsize(SCALARS[element])
            return np.frombuffer(self._take(count * size), dtype=SCALARS[element]).tolist()
        self._need(count)  # each element takes a byte at least: refuses an absurd count before looping over it
        return [self._value(element) for _ in range(count)]

    def _value_type(self) -> GGUFValueType:
        number = self._unpack("<I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise self._corrupt(f"value type {number} is unknown") from None

    def _read_tensors(self, count: int) -> Iterator[GGUFTensor]:
        self._need(count)
        infos = [self._tensor_info() for _ in range(count)]
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._corrupt(f"general.alignment is {alignment!r}")
        start = -(-self._position // alignment) * alignment
        for name, shape, number, offset in infos:
            yield self._tensor(name, shape, number, start + offset)

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, dimensions = self._string(), self._unpack("<I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise self._corrupt(f"tensor {name!r} has {dimensions} dimensions")
        shape = tuple(self._unpack("<Q") for _ in range(dimensions))[::-1]
        if 0 in shape:
            raise self._corrupt(f"tensor {name!r} has shape {list(shape)}")
        return name, shape, self._unpack("<I"), self._unpack("<Q")

    def _tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> GGUFTensor:
        kind = GGMLQuantizationType(number) if number in list(GGMLQuantizationType) else None
        if kind not in (*RAW_TYPES, *QUANTISED_TYPES):
            known = ", ".join(item.name for item in (*RAW_TYPES, *QUANTISED_TYPES))
            label = kind.name if kind else f"number {number}"
            raise UnsupportedModelError(f"tensor {name!r} in {self.path} has type {label}; supported are {known}")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise self._corrupt(f"rows of tensor {name!r} have {shape[-1]} elements, not a multiple of {kind.name}'s {block}")
        num_rows, row_bytes = math.prod(shape[:-1]), shape[-1] // block * block_bytes
        end = offset + num_rows * row_bytes
        if end > self._size:
            raise ModelLoadError(
                f"{self.path} is truncated: tensor {name!r} ends at byte {end:,}, the file at {self._size:,}; fetch it again"
            )
        rows = np.frombuffer(self._data, np.uint8, num_rows * row_bytes, offset).reshape(num_rows, row_bytes)
        return GGUFTensor(name, shape, kind, rows)

    def _string(self) -> str:
        raw = self._take(self._unpack("<Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self._corrupt(f"a string is not UTF-8 ({raw[:20]!r})") from None

    def _unpack(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _take(self, count: int) -> bytes:
        self._need(count)
        start, self._position = self._position, self._position + count
        return self._data[start : self._position]

    def _need(self, count: int) -> None:
        if count > self._size - self._position:
            raise ModelLoadError(
                f"{self.path} is truncated or corrupt: {count:,} bytes wanted at byte {self._position:,} of {self._size:,}; "
                "fetch it again"
            )

    def _corrupt(self, what: str) -> ModelLoadError:
        return ModelLoadError(f"{self.path} is corrupt: {what} (at byte {self._position:,}); fetch it again")
