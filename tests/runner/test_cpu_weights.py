"""Packed weights on disk: the same bits as from memory, one packer at a time, nothing half-written, nothing stale."""

import errno
import logging
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cpu_models import (
    WEIGHT_KINDS,
    CpuDriver,
    build_module,
    model_config,
    need_cpu_kernels,
    random_tokens,
    torch_logits,
    use_private_cache,
    write_checkpoint,
)
from torch import Tensor

from minivllm_kernels.cpu.decoder import DecoderWeights, check_weights
from minivllm_kernels.cpu.packing import pack_matrix
from minivllm_plugin.errors import ModelLoadError
from minivllm_plugin.models.catalog import resolve
from minivllm_plugin.models.loader import describe_model
from minivllm_plugin.runner import cpu_weights
from minivllm_plugin.runner.cpu_weights import decoder_geometry, pack_module, packed_weights
from minivllm_plugin.runner.tensor_file import map_tensors, write_tensors

SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own; the compiled library in it is the one that all tests share."""
    need_cpu_kernels()
    return use_private_cache(tmp_path / "cache", monkeypatch)


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, tied": ("Llama", {}),
    "llama, all biases, untied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 896, "head_dim": None}),
    "qwen3, untied": ("Qwen3", {"head_dim": 80, "tie_word_embeddings": False}),
}


def checkpoint(directory: Path, architecture: str = "Llama", seed: int = 0, **fields: Any) -> Path:
    fields = {name: value for name, value in fields.items() if value is not None}
    return write_checkpoint(build_module(model_config(architecture, **fields), seed), directory)


def weights_of(directory: Path, kind: str = "int8") -> DecoderWeights:
    source = resolve(str(directory))
    return packed_weights(source, describe_model(source), kind, load_format="auto", seed=0)


def logits_of(directory: Path, weights: DecoderWeights) -> Tensor:
    config = describe_model(resolve(str(directory))).config
    return CpuDriver(config, weights).run(random_tokens(40, config))


def packed_files(cache: Path) -> list[Path]:
    return sorted(cache.glob("packed/*/*.bin"))


def everything_below(cache: Path) -> set[str]:
    return {path.name for path in cache.glob("packed/*/*")}


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_mapped_weights_give_the_bits_of_those_in_memory(shape: str, kind: str, tmp_path: Path, cache: Path) -> None:
    architecture, fields = SHAPES[shape]
    directory = checkpoint(tmp_path / "model", architecture, **fields)
    config = describe_model(resolve(str(directory))).config
    module = build_module(config)
    expected = logits_of(directory, pack_module(module, kind))
    for _ in range(2):  # packed, then mapped
        assert torch.equal(logits_of(directory, weights_of(directory, kind)), expected)
    if kind == "float32":
        torch.testing.assert_close(expected, torch_logits(module, random_tokens(40, config)), atol=1e-4, rtol=0)
    assert [path.name for path in packed_files(cache)] == [f"{kind}.bin"]


def test_the_second_start_reads_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint(tmp_path / "model")
    first = logits_of(directory, weights_of(directory))
    monkeypatch.setattr(cpu_weights, "load_model", None)
    assert torch.equal(logits_of(directory, weights_of(directory)), first)


def test_a_bfloat16_checkpoint_is_packed_exactly(tmp_path: Path) -> None:
    module = build_module(model_config()).bfloat16().float()
    directory = write_checkpoint(module, tmp_path / "model", dtype=torch.bfloat16)
    exact = logits_of(directory, pack_module(module, "float32"))
    assert torch.equal(logits_of(directory, weights_of(directory, "bfloat16")), exact)
    assert torch.equal(logits_of(directory, weights_of(directory, "float32")), exact)


@pytest.mark.parametrize("change", ["weights", "config", "place"])
def test_a_changed_checkpoint_is_packed_anew(change: str, tmp_path: Path, cache: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    before = logits_of(directory, weights_of(directory))
    if change == "weights":
        checkpoint(directory, seed=1)
    elif change == "config":
        config = directory / "config.json"
        config.write_text(config.read_text().replace("1e-05", "0.001"))
    else:
        directory = directory.rename(tmp_path / "moved")
    after = logits_of(directory, weights_of(directory))
    assert len(packed_files(cache)) == 2
    assert torch.equal(after, before) == (change == "place")


def test_damage_names_the_file_and_deleting_it_helps(tmp_path: Path, cache: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    expected = logits_of(directory, weights_of(directory))
    [path] = packed_files(cache)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ModelLoadError, match="cut short; delete the file") as caught:
        weights_of(directory)
    assert str(path) in str(caught.value)
    path.unlink()
    assert torch.equal(logits_of(directory, weights_of(directory)), expected)


@pytest.mark.parametrize("name", ["embedding.data", "final_norm", "0.qkv.data", "1.input_norm", "1.down.scale"])
def test_a_file_of_another_model_is_refused(name: str, tmp_path: Path, cache: Path) -> None:
    """Tensors missing, of another shape, of another type: the library would read beyond them."""
    directory = checkpoint(tmp_path / "model")
    weights_of(directory)
    [path] = packed_files(cache)
    whole = {key: tensor.clone() for key, tensor in map_tensors(path).items()}
    wrong: list[dict[str, Tensor]] = [
        {key: tensor for key, tensor in whole.items() if key != name},
        {**whole, name: whole[name][:-1].contiguous()},
        {**whole, name: whole[name].float().bfloat16()},
    ]
    for tensors in wrong:
        write_tensors(path, tensors)
        with pytest.raises(ModelLoadError, match=r"packed weights in .*int8\.bin are not this model's: .*delete the file"):
            weights_of(directory)


def test_weights_are_checked_before_the_library_sees_them() -> None:
    config = model_config("Qwen3")
    weights = pack_module(build_module(config), "int8")
    check_weights(decoder_geometry(config), weights)
    for field, value in (
        ("vocab_size", 200),
        ("hidden_size", 128),
        ("intermediate_size", 48),
        ("head_dim", 80),
        ("num_heads", 4),
    ):
        geometry = decoder_geometry(model_config("Qwen3"))
        wrong = type(geometry)(**{**{name: getattr(geometry, name) for name in geometry.__slots__}, field: value})
        with pytest.raises(ValueError, match=r"is not|is wanted"):
            check_weights(wrong, weights)


def test_an_embedding_in_four_bits_is_refused() -> None:
    module = build_module(model_config())
    weights = pack_module(module, "int4")
    four_bits = replace(weights, embedding=pack_matrix(module.model.embed_tokens.weight, "int4"))
    with pytest.raises(ValueError, match="the embedding is int4"):
        CpuDriver(module.config, four_bits)


def refuse(error: int) -> Any:
    def write(path: Path, *_: object) -> None:
        path.write_bytes(b"half of it")
        raise OSError(error, os.strerror(error))

    return write


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_costs_the_file_and_not_the_start(
    error: int, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = checkpoint(tmp_path / "model")
    expected = logits_of(directory, pack_module(build_module(model_config()), "int8"))
    with monkeypatch.context() as patch:
        patch.setattr(cpu_weights, "write_tensors", refuse(error))
        assert torch.equal(logits_of(directory, weights_of(directory)), expected)
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert os.strerror(error) in record.getMessage()
    assert "set MINIVLLM_CACHE to a directory that has room" in record.getMessage()
    assert everything_below(cache) <= {".lock"}
    weights_of(directory)  # there is room again
    assert len(packed_files(cache)) == 1


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = checkpoint(tmp_path / "model")
    occupied = tmp_path / "occupied"
    occupied.write_text("")
    monkeypatch.setenv("MINIVLLM_CACHE", str(occupied))
    weights = weights_of(directory)
    assert torch.equal(logits_of(directory, weights), logits_of(directory, pack_module(build_module(model_config()), "int8")))
    assert "every start packs them again" in caplog.text


def test_a_checkpoint_that_cannot_be_read_is_its_own_error(tmp_path: Path, cache: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    os.truncate(directory / "model.safetensors", 1000)
    with pytest.raises(ModelLoadError, match="safetensors"):
        weights_of(directory)
    assert everything_below(cache) <= {".lock"}


PACK = """
import logging, sys
logging.basicConfig(level="INFO", format="%(message)s", stream=sys.stdout)
from pathlib import Path
from minivllm_plugin.models.catalog import resolve
from minivllm_plugin.models.loader import describe_model
from minivllm_plugin.runner import cpu_weights
write = cpu_weights.write_tensors
def slowly(path, tensors):
    path.write_bytes(b"half of it")
    print("writing", flush=True)
    import time
    time.sleep({seconds})
    write(path, tensors)
cpu_weights.write_tensors = slowly
source = resolve(sys.argv[1])
weights = cpu_weights.packed_weights(source, describe_model(source), "int8", load_format="auto", seed=0)
print("channels", weights.embedding.channels, flush=True)
"""


def packer(directory: Path, seconds: float) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", PACK.format(seconds=seconds), str(directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_two_processes_at_once(tmp_path: Path, cache: Path) -> None:
    """One packs, the other waits and maps what the first made."""
    directory = checkpoint(tmp_path / "model")
    outputs = [process.communicate(timeout=120)[0] for process in [packer(directory, 1.0), packer(directory, 1.0)]]
    assert sum("writing" in output for output in outputs) == 1, outputs
    assert all(output.endswith("channels 128\n") for output in outputs), outputs
    assert everything_below(cache) == {".lock", "int8.bin"}


def test_a_killed_packer_leaves_nothing_that_counts(tmp_path: Path, cache: Path) -> None:
    directory = checkpoint(tmp_path / "model")
    process = packer(directory, 600.0)
    assert process.stdout is not None
    while "writing" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    process.stdout.close()
    assert packed_files(cache) == []
    assert len(list(cache.glob("packed/*/.partial-*/int8.bin"))) == 1
    weights_of(directory)  # the lock died with its holder
    assert everything_below(cache) == {".lock", "int8.bin"}
