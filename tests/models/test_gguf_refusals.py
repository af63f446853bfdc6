"""What a GGUF may hold that we do not read, and every kind of damage: an error that names it, and nothing left behind."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from tiny_gguf import leftovers, plain, small, write_gguf
from tiny_models import load_directory

from minivllm_plugin.errors import ModelLoadError, UnsupportedModelError
from minivllm_plugin.models.gguf import convert


@pytest.fixture(autouse=True)
def _own_cache(empty_cache: Path) -> None:
    """Conversions of this file's tests never meet the user's cache."""


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "yarn"),
        ({"llama.expert_count": 8}, "expert_count=8"),
        ({"llama.attention.sliding_window": 16}, "window 16"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.rope.dimension_count": 2}, "head size 4"),
        ({"llama.attention.head_count_kv": [2, 1]}, "head_count_kv"),
        ({"llama.attention.value_length": 6}, "head size 4"),
        ({"tokenizer.ggml.model": "t5"}, "'t5'"),
        ({"tokenizer.ggml.pre": "tekken"}, "'tekken'"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", small(), metadata=metadata)
    with pytest.raises(UnsupportedModelError, match=named):
        convert(path, tmp_path / "out")
    assert leftovers(tmp_path / "out") == []


def test_rope_factors_and_linear_scaling_together_are_refused(tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    path = write_gguf(tmp_path / "model.gguf", small(), metadata=scaling, extra={"rope_freqs.weight": plain(torch.ones(2))})
    with pytest.raises(UnsupportedModelError, match="rope_freqs"):
        convert(path, tmp_path / "out")


def test_a_wrong_number_of_rope_factors_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", small(), extra={"rope_freqs.weight": plain(torch.ones(3))})
    with pytest.raises(ModelLoadError, match="3 factors, expected 2"):
        convert(path, tmp_path / "out")


def test_a_bias_in_some_projections_only_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", small(attention_bias=True), leave_out=("blk.0.attn_output.bias",))
    with pytest.raises(UnsupportedModelError, match="none in attn_output"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.embedding_length": 17}, "17"),
        ({"llama.block_count": 3}, "model.layers.2."),
        ({"llama.feed_forward_length": 25}, "mlp"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "token types"),
        ({"tokenizer.ggml.merges": ["a b", "q nothere"]}, "corrupt"),
        ({"tokenizer.ggml.merges": ["ab"]}, "'ab'"),
        ({"tokenizer.ggml.eos_token_id": 5000}, "5000"),
    ],
)
def test_what_makes_no_sense_is_named(metadata: dict[str, Any], named: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", small(), metadata=metadata)
    with pytest.raises(ModelLoadError, match=named):
        convert(path, tmp_path / "out")
    assert leftovers(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("tensor", "named"),
    [("blk.1.ffn_down.weight", r"model\.layers\.1\.mlp\.down_proj\.weight"), ("token_embd.weight", r"token_embd\.weight")],
)
def test_a_missing_tensor_is_named_with_the_file(tensor: str, named: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", small(), leave_out=(tensor,))
    with pytest.raises(ModelLoadError, match=rf"model\.gguf.*{named}"):
        convert(path, tmp_path / "out")


def test_an_unknown_tensor_is_reported_and_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_gguf(tmp_path / "model.gguf", small(), extra={"blk.0.mystery.weight": plain(torch.ones(3))})
    load_directory(path)
    assert "blk.0.mystery.weight" in caplog.text


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q2_K, GGMLQuantizationType.IQ4_NL, GGMLQuantizationType.I32])
def test_a_tensor_type_that_is_not_read_is_named(kind: GGMLQuantizationType, tmp_path: Path) -> None:
    from gguf import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[kind]
    data = np.zeros((2, size), dtype=np.uint8) if block > 1 else np.zeros((2, 4), dtype=np.int32)
    path = write_gguf(tmp_path / "model.gguf", small(), extra={"blk.0.attn_odd.weight": (data, kind)})
    with pytest.raises(UnsupportedModelError, match=rf"blk\.0\.attn_odd\.weight.*{kind.name}"):
        convert(path, tmp_path / "out")


def test_a_tensor_type_from_the_future_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", small())
    content = bytearray(path.read_bytes())
    at = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    content[at : at + 4] = (999).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(UnsupportedModelError, match=r"token_embd\.weight.*999"):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize(("content", "named"), [(b"", "0 bytes"), (b"PK\x03\x04rest of a zip", "does not start with GGUF")])
def test_a_file_of_another_kind(content: bytes, named: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=named):
        convert(path, tmp_path / "out")


@pytest.mark.parametrize(("version", "named"), [(b"\x01\0\0\0", "version 1"), (b"\0\0\0\x03", "big endian")])
def test_other_versions_are_named(version: bytes, named: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", small())
    content = path.read_bytes()
    path.write_bytes(content[:4] + version + content[8:])
    with pytest.raises(UnsupportedModelError, match=named):
        convert(path, tmp_path / "out")


def patched(path: Path, after: bytes, skip: int, value: bytes) -> Path:
    """Overwrite ``value`` in the file, ``skip`` bytes behind the first place of ``after``."""
    content = bytearray(path.read_bytes())
    at = content.index(after) + len(after) + skip
    content[at : at + len(value)] = value
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("after", "skip", "value", "named"),
    [
        (b"llama.block_count", 0, b"\x63\0\0\0", "value type 99"),
        (b"token_embd.weight", 0, b"\x05\0\0\0", "5 dimensions"),
        (b"token_embd.weight", 4, b"\0" * 8, r"shape \[97, 0\]"),
        (b"token_embd.weight", 20, b"\x02\0\0\0", "not a multiple of Q4_0's 32"),
        (b"tokenizer.ggml.model", 4, b"\xff" * 8, "bytes wanted"),
        (b"tokenizer.ggml.model", 12, b"\xff\xfe", "not UTF-8"),
        (b"blk.1.ffn_", 0, b"xx", "is incomplete"),
        (b"blk.1.attn_", 0, b"k", "twice"),
    ],
)
def test_a_corrupt_header_is_named(after: bytes, skip: int, value: bytes, named: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", small())
    with pytest.raises(ModelLoadError, match=named):
        convert(patched(path, after, skip, value), tmp_path / "out")


def test_a_truncated_file_is_named_wherever_it_was_cut(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", small())
    content = path.read_bytes()
    for length in [*range(1, len(content), 997), len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(ModelLoadError, match=r"model\.gguf"):
            convert(path, tmp_path / "out")
    assert leftovers(tmp_path / "out") == []


def test_flipped_bytes_never_end_in_a_bare_exception(tmp_path: Path) -> None:
    """Any damage to the header either leaves a model that loads, or is one of the two errors."""
    path = write_gguf(tmp_path / "model.gguf", small())
    content = path.read_bytes()
    generator = np.random.default_rng(0)
    header = content.index(b"output_norm") + 40
    for _ in range(300):
        damaged = bytearray(content)
        for position in generator.integers(4, header, size=2):
            damaged[position] = int(generator.integers(0, 256))
        path.write_bytes(damaged)
        with contextlib.suppress(ModelLoadError, UnsupportedModelError):
            load_directory(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"nowhere\.gguf"):
        convert(tmp_path / "nowhere.gguf", tmp_path / "out")
