"""Directories of safetensors: shards, strays, gaps, damage (trials F04); tensors we have no place for."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import PLAIN_LLAMA, is_right, load_directory, reference_model, rewrite

from minivllm_plugin.errors import ModelLoadError, UnsupportedModelError

INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def reference() -> Any:
    return reference_model("Llama", PLAIN_LLAMA)


@pytest.fixture
def single(reference: Any, tmp_path: Path) -> Path:
    """config.json and one model.safetensors."""
    reference.save_pretrained(tmp_path / "single")
    return tmp_path / "single"


@pytest.fixture
def sharded(reference: Any, tmp_path: Path) -> Path:
    """config.json, an index and at least three shards."""
    reference.save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) >= 3
    return tmp_path / "sharded"


# Which files count


def test_one_file_and_many_shards_give_the_same(single: Path, sharded: Path, reference: Any) -> None:
    assert is_right(single, reference)
    assert is_right(sharded, reference)


@pytest.mark.parametrize("stray", ["aaa.safetensors", "zzz.safetensors", "model.safetensors"])
def test_a_stray_file_beside_an_index_is_ignored(sharded: Path, reference: Any, stray: str) -> None:
    """Whether a listing would have it first or last, and whatever it holds."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in reference.state_dict().items()}
    save_file(tensors, sharded / stray, metadata={"format": "pt"})
    assert is_right(sharded, reference)


def test_a_tensor_in_a_shard_that_the_index_places_elsewhere_is_ignored(sharded: Path, reference: Any) -> None:
    where = json.loads((sharded / INDEX).read_text())["weight_map"]
    other = next(file for file in where.values() if file != where["model.norm.weight"])
    rewrite(sharded, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(32)}), other)
    assert is_right(sharded, reference)


def test_a_stray_file_beside_a_single_one_is_ignored(single: Path, reference: Any) -> None:
    save_file({"model.norm.weight": torch.zeros(32)}, single / "adapter.safetensors", metadata={"format": "pt"})
    assert is_right(single, reference)


def test_shards_without_index_load_when_disjoint(sharded: Path, reference: Any) -> None:
    (sharded / INDEX).unlink()
    assert is_right(sharded, reference)


def test_shards_without_index_that_overlap_are_refused(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    shutil.copy(sorted(sharded.glob("*.safetensors"))[0], sharded / "old.safetensors")
    with pytest.raises(ModelLoadError, match=r"old\.safetensors.*index"):
        load_directory(sharded)


def test_no_weights_at_all(single: Path) -> None:
    (single / "model.safetensors").rename(single / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors.*pytorch_model\.bin"):
        load_directory(single)


# Gaps and damage


def test_a_missing_shard_is_named(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(ModelLoadError, match=f"missing shard.*{gone.name}"):
        load_directory(sharded)


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_a_truncated_file_is_named(single: Path, keep: int) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is truncated or corrupt"):
        load_directory(single)


def test_a_corrupt_header_is_named(single: Path) -> None:
    path = single / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:40] = b"\xff" * 32
    path.write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"model\.safetensors"):
        load_directory(single)


@pytest.mark.parametrize(
    "name",
    ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.weight", "lm_head.weight", "model.norm.weight"],
)
def test_a_missing_parameter_is_named_with_the_file(single: Path, name: str) -> None:
    rewrite(single, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelLoadError, match=rf"model\.safetensors.*{name}"):
        load_directory(single)


def test_many_missing_parameters_are_counted(single: Path) -> None:
    rewrite(single, lambda tensors: [tensors.pop(name) for name in list(tensors) if "layers" in name])
    with pytest.raises(ModelLoadError, match="and 13 more"):
        load_directory(single)


def test_an_index_that_promises_too_much_is_named(sharded: Path) -> None:
    where = json.loads((sharded / INDEX).read_text())["weight_map"]
    rewrite(sharded, lambda tensors: tensors.pop("model.norm.weight"), where["model.norm.weight"])
    with pytest.raises(ModelLoadError, match=rf"{where['model.norm.weight']}.*model\.norm\.weight"):
        load_directory(sharded)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/passwd", "", None])
def test_an_index_that_points_outside_is_refused(sharded: Path, file: Any) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = file
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="beside it"):
        load_directory(sharded)


@pytest.mark.parametrize("content", ["", "{}", "[1]", '{"weight_map": {}}', "not json"])
def test_a_broken_index_is_named(sharded: Path, content: str) -> None:
    (sharded / INDEX).write_text(content)
    with pytest.raises(ModelLoadError, match=INDEX):
        load_directory(sharded)


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "model.layers.0.self_attn.v_proj.weight"])
def test_a_wrong_shape_is_named(single: Path, name: str) -> None:
    rewrite(single, lambda tensors: tensors.update({name: torch.zeros(3, 32)}))
    with pytest.raises(ModelLoadError, match=rf"{name}.*\[3, 32\].*asks for"):
        load_directory(single)


def test_a_quantised_tensor_is_refused_by_name(single: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(single, lambda tensors: tensors.update({name: torch.zeros(48, 32, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModelError, match=f"{name}.*I8"):
        load_directory(single)


@pytest.mark.parametrize("content", ["", "[]", "{", "\xff"])
def test_a_broken_config_is_named(single: Path, content: str) -> None:
    (single / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_directory(single)


# Other tensors than ours


def test_extra_tensors_are_reported_once_and_known_ones_skipped(single: Path, reference: Any, caplog: Any) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "mystery.a": torch.zeros(1),
        "mystery.b": torch.zeros(1),
    }
    rewrite(single, lambda tensors: tensors.update(extra))
    assert is_right(single, reference)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "mystery.a" in warnings[0]
    assert "inv_freq" not in warnings[0]


def test_a_head_beside_tied_embeddings_is_skipped(tmp_path: Path, caplog: Any) -> None:
    tied = reference_model("Llama", PLAIN_LLAMA | {"tie_word_embeddings": True})
    tied.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(97, 32)}))
    assert is_right(tmp_path, tied)
    assert caplog.records == []


def test_fused_projections_load_too(single: Path, reference: Any) -> None:
    def fuse(tensors: dict[str, torch.Tensor]) -> None:
        for i in range(2):
            for fused, parts in (("self_attn.qkv_proj", "qkv"), ("mlp.gate_up_proj", ("gate", "up"))):
                room = fused.partition(".")[0]
                pieces = [tensors.pop(f"model.layers.{i}.{room}.{part}_proj.weight") for part in parts]
                tensors[f"model.layers.{i}.{fused}.weight"] = torch.cat(pieces)

    rewrite(single, fuse)
    assert is_right(single, reference)
