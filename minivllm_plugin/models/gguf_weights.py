"""The tensors of a GGUF as Hugging Face has them: names, row order, values; and the safetensors file made of them.

Rows are converted in bounded pieces, so that a model never has to fit in memory to be converted.
"""

import json
import math
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from minivllm_plugin.errors import ModelLoadError, UnsupportedModelError
from minivllm_plugin.models.gguf_file import GGUFFile, GGUFTensor

__all__ = ["ROPE_FACTORS", "ConvertedTensor", "dequantized", "plan_conversion", "write_safetensors"]

# llama.cpp rotates neighbouring dimensions (i, i + 1) in llama, so its converter reorders q and k rows; not in the others.
INTERLEAVED_ROTARY = ("llama",)
MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS = "rope_freqs.weight"
ELEMENT_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
PIECE_ELEMENTS = 4 * 2**20


@dataclass(frozen=True, slots=True)
class ConvertedTensor:
    """One tensor to be written.

    Attributes:
        name: Hugging Face's.
        order: row of the GGUF tensor for each row written (for a vector: element); None keeps the order.
    """

    name: str
    tensor: GGUFTensor
    order: NDArray[np.int64] | None

    @property
    def dtype(self) -> str:
        """safetensors' name of the type written: raw types stay what they are, quantised ones become F32."""
        return self.tensor.type.name if self.tensor.is_raw else "F32"

    @property
    def num_bytes(self) -> int:
        return math.prod(self.tensor.shape) * ELEMENT_BYTES[self.dtype]

    def values(self) -> Iterator[NDArray[Any]]:
        """Contiguous values in pieces of whole rows."""
        rows = self.tensor.rows
        if self.order is not None and len(self.tensor.shape) == 1:
            rows = rows.reshape(len(self.order), -1)  # a bias is one row in the file; its elements are what is reordered
        step = max(1, PIECE_ELEMENTS // self.tensor.shape[-1])
        for start in range(0, len(rows), step):
            stop = start + step
            piece = rows[start:stop] if self.order is None else rows[self.order[start:stop]]
            yield np.ascontiguousarray(piece if self.tensor.is_raw else dequantized(piece, self.tensor))


def plan_conversion(file: GGUFFile, config: Mapping[str, Any]) -> list[ConvertedTensor]:
    """Every tensor but the rope factors (they went to config.json); unknown ones keep their name, for the loader's warning."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    interleaved = config["model_type"] in INTERLEAVED_ROTARY
    plan = []
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        stem, _, attribute = name.rpartition(".")
        block, _, layer = stem.removeprefix("blk.").partition(".")
        order = None
        if stem.startswith("blk.") and layer in LAYER_NAMES:
            if interleaved and layer in heads:
                order = _paired_rows(tensor, heads[layer], file)
            name = f"model.layers.{block}.{LAYER_NAMES[layer]}.{attribute}"
        elif stem in MODEL_NAMES:
            name = f"{MODEL_NAMES[stem]}.{attribute}"
        plan.append(ConvertedTensor(name, tensor, order))
    # Wider elements first keeps every tensor aligned to its own size.
    return sorted(plan, key=lambda entry: -ELEMENT_BYTES[entry.dtype])


def write_safetensors(plan: Sequence[ConvertedTensor], path: Path) -> None:
    """One safetensors file of these tensors, in their order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in plan:
        start, end = end, end + entry.num_bytes
        header[entry.name] = {"dtype": entry.dtype, "shape": entry.tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for entry in plan:
            for piece in entry.values():
                out.write(piece.data)
        out.flush()
        os.fsync(out.fileno())  # else a power cut after the rename could leave zeros under a finished name


def dequantized(rows: NDArray[np.uint8], tensor: GGUFTensor) -> NDArray[np.float32]:
    """float32 values of whole rows (uint8 ``[n, row bytes]``) of ``tensor``."""
    from gguf.quants import dequantize

    # Scales of zero-filled blocks may be denormal or infinite halves; the values, not the warnings, are what counts.
    with np.errstate(all="ignore"):
        values: NDArray[np.float32] = dequantize(rows, tensor.type)
    return values


def _paired_rows(tensor: GGUFTensor, heads: int, file: GGUFFile) -> NDArray[np.int64]:
    """Undo the converter: within a head it wrote rows 0, D/2, 1, D/2 + 1, …; we want 0, 1, …, D - 1."""
    rows = tensor.shape[0]
    if len(tensor.shape) == 1 and not tensor.is_raw:
        raise UnsupportedModelError(f"tensor {tensor.name!r} in {file.path} is a quantised vector, which is not supported")
    if rows % (2 * heads):
        raise ModelLoadError(f"tensor {tensor.name!r} in {file.path} has {rows} rows, which do not divide into {heads} heads")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()
