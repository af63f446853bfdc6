"""GGUF: weights back bit for bit (trials F01), rope, refusals by name (F04), one conversion however many ask."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, quants
from safetensors import safe_open
from tiny_gguf import leftovers, llama3_rope_factors, plain, small, write_gguf
from tiny_models import LLAMA3_ROPE, SHAPES, Driver, load_directory, reference_logits, reference_model

from minivllm_plugin.errors import ModelLoadError
from minivllm_plugin.models import gguf
from minivllm_plugin.models.gguf import convert

TOKENS = list(range(3, 43))


@pytest.fixture(autouse=True)
def _own_cache(empty_cache: Path) -> None:
    """Conversions of this file's tests never meet the user's cache."""


def parameters(loaded: Any) -> dict[str, torch.Tensor]:
    return dict(loaded.module.named_parameters())


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_gguf_loads_what_the_safetensors_hold(name: str, tmp_path: Path) -> None:
    """Bit for bit, in every architecture: q and k rows reordered for llama with the right head count, for qwen not at all."""
    family, fields = SHAPES[name]
    reference = reference_model(family, fields)
    reference.save_pretrained(tmp_path / "hf")
    rope, extra, metadata = reference.config.rope_parameters, {}, {}
    if rope["rope_type"] == "llama3":
        extra["rope_freqs.weight"] = plain(llama3_rope_factors(rope, reference.config.head_dim))
    if rope["rope_type"] == "linear":
        metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": rope["factor"]}
    from_gguf = load_directory(write_gguf(tmp_path / "model.gguf", reference, extra=extra, metadata=metadata))
    from_safetensors = load_directory(tmp_path / "hf")
    assert parameters(from_gguf).keys() == parameters(from_safetensors).keys()
    for key, value in parameters(from_safetensors).items():
        assert torch.equal(parameters(from_gguf)[key], value), key
    assert from_gguf.config.tie_word_embeddings == from_safetensors.config.tie_word_embeddings
    assert from_gguf.config.rms_norm_eps == from_safetensors.config.rms_norm_eps
    logits = Driver(from_gguf).run(TOKENS, [30, 1, 9])
    torch.testing.assert_close(logits, reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_grouped_heads_of_four_dimensions(family: str, tmp_path: Path) -> None:
    """The case of trials F01: 4 heads, 2 key heads, head size 4."""
    reference = small(family)
    loaded = load_directory(write_gguf(tmp_path / "model.gguf", reference))
    attention = reference.model.layers[1].self_attn
    expected = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(loaded.module.model.layers[1].self_attn.qkv_proj.weight, expected)


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_raw_half_types_are_kept(kind: str, tmp_path: Path) -> None:
    reference = small()
    raw = GGMLQuantizationType[kind]

    def encode(name: str, values: torch.Tensor) -> Any:
        return (quants.quantize(values.numpy(), raw), raw) if values.ndim == 2 else plain(values)

    path = write_gguf(tmp_path / "model.gguf", reference, encode=encode)
    with safe_open(convert(path, tmp_path / "out") / "model.safetensors", framework="pt") as file:
        assert file.get_slice("model.embed_tokens.weight").get_dtype() == kind
        assert file.get_slice("model.norm.weight").get_dtype() == "F32"
    loaded = load_directory(path)
    half = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    assert loaded.config.dtype == str(half).removeprefix("torch.")
    expected = reference.model.embed_tokens.weight.to(half).float()
    assert torch.equal(loaded.module.model.embed_tokens.weight, expected)


def test_linear_layers_keep_their_row_order_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from minivllm_plugin.models import gguf_weights

    reference = small()
    whole = parameters(load_directory(write_gguf(tmp_path / "a.gguf", reference)))
    monkeypatch.setattr(gguf_weights, "PIECE_ELEMENTS", 48)
    pieces = parameters(load_directory(write_gguf(tmp_path / "b.gguf", reference)))
    assert all(torch.equal(whole[name], pieces[name]) for name in whole)


def test_end_of_turn_ids_and_sampling_defaults(tmp_path: Path) -> None:
    reference = small()
    metadata = {"tokenizer.ggml.eot_token_id": 5, "general.sampling.temp": 0.5, "general.sampling.top_k": 20}
    loaded = load_directory(write_gguf(tmp_path / "model.gguf", reference, metadata=metadata))
    assert loaded.config.eos_token_ids == (2, 5)
    assert loaded.config.bos_token_id == 1
    assert loaded.generation_defaults == {"temperature": 0.5, "top_k": 20}
    assert loaded.directory is not None
    assert (loaded.directory / "tokenizer.json").is_file()


def test_a_second_call_reads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", small())
    first = convert(path, tmp_path / "out")
    monkeypatch.setattr(gguf, "_write", None)
    assert convert(path, tmp_path / "out") == first


def test_another_file_under_the_same_name_is_converted_anew(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", small())
    first = convert(path, tmp_path / "out")
    write_gguf(path, small(hidden_size=20))
    second = convert(path, tmp_path / "out")
    assert second != first
    assert json.loads((second / "config.json").read_text())["hidden_size"] == 20


def test_threads_that_ask_at_once_get_one_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", small())
    calls, write = [], gguf._write
    monkeypatch.setattr(gguf, "_write", lambda *args: (calls.append(args), write(*args)))
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(convert(path, tmp_path / "out"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == len(calls) == 1


CONVERT = """
import sys
from pathlib import Path
from minivllm_plugin.models.gguf import convert
print(convert(*map(Path, sys.argv[1:])))
"""


def test_processes_that_ask_at_once_all_get_the_whole_model(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", small())
    command = [sys.executable, "-c", CONVERT, str(path), str(tmp_path / "out")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    found = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert found == {str(convert(path, tmp_path / "out"))}
    assert leftovers(tmp_path / "out") == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


LIMITED = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))\n" + CONVERT


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    """The system refuses to let the file grow, as a full disk does: in the middle of the weights."""
    pytest.importorskip("resource")
    path = write_gguf(tmp_path / "model.gguf", small(vocab_size=500))
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(path), str(tmp_path / "out")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert "ModelLoadError" in run.stderr
    assert str(tmp_path / "out") in run.stderr
    assert leftovers(tmp_path / "out") == []


def test_too_little_space_is_said_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_gguf(tmp_path / "model.gguf", small())
    monkeypatch.setattr(gguf.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(ModelLoadError, match="only 1,000 are free"):
        convert(path, tmp_path / "out")
    assert leftovers(tmp_path / "out") == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "model.gguf", small())
    (tmp_path / "out").write_text("a file where the cache should be")
    with pytest.raises(ModelLoadError, match=r"out.*MINIVLLM_CACHE"):
        convert(path, tmp_path / "out")


def test_llama3_scaling_comes_from_the_factors(tmp_path: Path) -> None:
    reference = small(rope_parameters=LLAMA3_ROPE)
    factors = llama3_rope_factors(LLAMA3_ROPE, 4)
    loaded = load_directory(write_gguf(tmp_path / "model.gguf", reference, extra={"rope_freqs.weight": plain(factors)}))
    assert loaded.config.rope.kind == "factors"
    assert loaded.config.rope.params == tuple(factors.tolist())
