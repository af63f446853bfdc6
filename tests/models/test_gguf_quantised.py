"""Every quantised type against its definition in ggml, written out per value, bit for bit, through a whole load."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from tiny_gguf import Encoded, plain, write_gguf
from tiny_models import Driver, load_directory, reference_model

FIELDS = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 1,
    "vocab_size": 40,
}
f32 = np.float32


def half(raw: bytes) -> np.float32:
    return f32(struct.unpack("<e", raw)[0])


def nibbles(raw: bytes) -> list[int]:
    """Low halves of all bytes, then high halves."""
    return [byte & 15 for byte in raw] + [byte >> 4 for byte in raw]


def q8_0(block: bytes) -> list[np.float32]:
    return [half(block[:2]) * f32(q) for q in struct.unpack("<32b", block[2:])]


def q4_0(block: bytes) -> list[np.float32]:
    return [half(block[:2]) * f32(q - 8) for q in nibbles(block[2:])]


def q4_1(block: bytes) -> list[np.float32]:
    return [half(block[:2]) * f32(q) + half(block[2:4]) for q in nibbles(block[4:])]


def q5_0(block: bytes) -> list[np.float32]:
    high = int.from_bytes(block[2:6], "little")
    return [half(block[:2]) * f32((q | (high >> i & 1) << 4) - 16) for i, q in enumerate(nibbles(block[6:]))]


def q5_1(block: bytes) -> list[np.float32]:
    high = int.from_bytes(block[4:8], "little")
    return [half(block[:2]) * f32(q | (high >> i & 1) << 4) + half(block[2:4]) for i, q in enumerate(nibbles(block[8:]))]


def q4_k(block: bytes) -> list[np.float32]:
    scales, quants, out = block[4:16], block[16:], []
    for i in range(8):  # sub-blocks of 32; 6-bit scale and minimum packed over 12 bytes
        if i < 4:
            scale, minimum = scales[i] & 63, scales[i + 4] & 63
        else:
            scale = scales[i + 4] & 15 | scales[i - 4] >> 6 << 4
            minimum = scales[i + 4] >> 4 | scales[i] >> 6 << 4
        part = quants[i // 2 * 32 : i // 2 * 32 + 32]
        shift = 4 * (i % 2)
        out += [half(block[:2]) * f32(scale) * f32(byte >> shift & 15) - half(block[2:4]) * f32(minimum) for byte in part]
    return out


def q6_k(block: bytes) -> list[np.float32]:
    low, high = block[:128], block[128:192]
    scales, scale = struct.unpack("<16b", block[192:208]), half(block[208:])
    out = []
    for i in range(256):
        half_block, within = divmod(i, 128)
        group, lane = divmod(within, 32)
        bits = low[half_block * 64 + group % 2 * 32 + lane] >> 4 * (group // 2) & 15
        bits |= (high[half_block * 32 + lane] >> 2 * group & 3) << 4
        out.append(scale * f32(scales[i // 16]) * f32(bits - 32))
    return out


DEFINITIONS: dict[str, tuple[Callable[[bytes], list[np.float32]], tuple[int, ...]]] = {
    # type -> its definition, and where in a block its half-precision numbers stand
    "Q8_0": (q8_0, (0,)),
    "Q4_0": (q4_0, (0,)),
    "Q4_1": (q4_1, (0, 2)),
    "Q5_0": (q5_0, (0,)),
    "Q5_1": (q5_1, (0, 2)),
    "Q4_K": (q4_k, (0, 2)),
    "Q6_K": (q6_k, (208,)),
}


def random_blocks(name: str, rows: int, columns: int, generator: np.random.Generator) -> np.ndarray:
    """Blocks of random bits with moderate scales: uint8 ``[rows, bytes of one row]``."""
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    data = generator.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at in DEFINITIONS[name][1]:
        scales = generator.uniform(0.001, 0.01, data.shape[:2]).astype(np.float16)
        data[..., at : at + 2] = scales[..., None].view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize("name", list(DEFINITIONS))
def test_values_equal_the_definition(name: str, tmp_path: Path, empty_cache: Path) -> None:
    kind = GGMLQuantizationType[name]
    generator = np.random.default_rng(0)
    stored: dict[str, np.ndarray] = {}

    def encode(tensor_name: str, values: torch.Tensor) -> Encoded:
        if values.ndim == 1:
            return plain(values)
        stored[tensor_name] = random_blocks(name, *values.shape, generator)
        return stored[tensor_name], kind

    reference = reference_model("Llama", FIELDS)
    loaded = load_directory(write_gguf(tmp_path / "model.gguf", reference, encode=encode))
    layer = loaded.module.model.layers[0]
    q_rows = torch.arange(256).reshape(4, 32, 2).swapaxes(1, 2).flatten()
    checks: dict[str, Any] = {
        "token_embd.weight": loaded.module.model.embed_tokens.weight,
        "blk.0.ffn_down.weight": layer.mlp.down_proj.weight,
        "blk.0.attn_q.weight": layer.self_attn.qkv_proj.weight[:256][q_rows.argsort()],
    }
    for tensor_name, got in checks.items():
        size = GGML_QUANT_SIZES[kind][1]
        rows = [row.tobytes() for row in stored[tensor_name][:5]]
        expected = [[v for at in range(0, len(row), size) for v in DEFINITIONS[name][0](row[at : at + size])] for row in rows]
        assert np.array_equal(got[:5].numpy(), np.array(expected, dtype=np.float32)), tensor_name
    assert loaded.config.dtype == "float32"
    assert Driver(loaded).run([1, 2, 3], [3]).isfinite().all()
