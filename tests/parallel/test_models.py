"""Whole models shared by ranks of one process: what they compute, what each reads, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from simulated_world import run_world
from tiny_models import SHAPES, Driver, load_directory, reference_model
from torch import Tensor

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.models import checkpoint
from minivllm_plugin.models.catalog import ModelSource, resolve
from minivllm_plugin.models.loader import LoadedModel, describe_model, load_model
from minivllm_plugin.parallel.context import ParallelContext
from minivllm_plugin.parallel.partition import check_partition, partition_sizes

TOKENS = torch.randint(3, 97, (21,), generator=torch.Generator().manual_seed(7)).tolist()
# Every shape with every number of ranks that it goes with; 97 tokens of vocabulary divide by none of them.
SIZES = {
    "llama, 4:1 heads, llama3 rope, untied": (2, 4),
    "llama, 9:3 heads, tied": (),  # 40 columns of the MLP do not divide by 3
    "llama, all biases, linear rope": (),  # nor do 56
    "qwen2, 6:2 heads, tied": (2,),
    "qwen3, heads wider than hidden, untied": (2, 4),
    "qwen3, attention bias, eps 1e-5, tied": (2, 4),
}
OF_THREE = {
    "llama, 9:3 heads, tied, of three": ("llama, 9:3 heads, tied", {"intermediate_size": 42}),
    "llama, all biases, of three": ("llama, all biases, linear rope", {"intermediate_size": 57}),
}
CASES = [(SHAPES[name], size) for name, sizes in SIZES.items() for size in sizes] + [
    ((SHAPES[name][0], SHAPES[name][1] | fields), 3) for name, fields in OF_THREE.values()
]


@pytest.mark.parametrize(("shape", "size"), CASES)
def test_ranks_compute_what_one_computes(shape: tuple[str, dict[str, Any]], size: int, tmp_path: Path) -> None:
    reference_model(*shape).save_pretrained(tmp_path)
    chunks = [9, 1, 1, 10]
    expected = Driver(load_directory(tmp_path)).run(TOKENS, chunks)

    def one(parallel: ParallelContext) -> Tensor:
        return Driver(load_directory(tmp_path, parallel=parallel)).run(TOKENS, chunks)

    logits = run_world(size, one)
    torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=0)
    assert [part.shape for part in logits[1:]] == [(len(TOKENS), 0)] * (size - 1)


def test_dummy_ranks_are_parts_of_the_same_noise() -> None:
    family, fields = SHAPES["qwen3, heads wider than hidden, untied"]
    architecture = reference_model(family, fields).config.to_dict() | {"architectures": ["Qwen3ForCausalLM"]}
    source = ModelSource.from_architecture(architecture)

    def one(parallel: ParallelContext) -> dict[str, Tensor]:
        return dict(load_model(source, load_format="dummy", parallel=parallel).module.named_parameters())

    [whole], (first, second) = run_world(1, one), run_world(2, one)
    layer = "model.layers.1"
    for name in ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm"):
        assert torch.equal(first[f"{layer}.{name}.weight"], whole[f"{layer}.{name}.weight"])
        assert torch.equal(second[f"{layer}.{name}.weight"], whole[f"{layer}.{name}.weight"])
    for name, dim in (("self_attn.o_proj", 1), ("mlp.down_proj", 1)):
        both = torch.cat((first[f"{layer}.{name}.weight"], second[f"{layer}.{name}.weight"]), dim)
        assert torch.equal(both, whole[f"{layer}.{name}.weight"])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(torch.cat((first[name], second[name]))[:97], whole[name])
    gates = [part[f"{layer}.mlp.gate_up_proj.weight"].chunk(2) for part in (first, second)]
    stacked = torch.cat([gate for gate, _ in gates] + [up for _, up in gates])
    assert torch.equal(stacked, whole[f"{layer}.mlp.gate_up_proj.weight"])


def test_a_rank_reads_its_own_part_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference_model(*SHAPES["qwen3, heads wider than hidden, untied"]).save_pretrained(tmp_path)
    read: list[str] = []
    tensor = checkpoint.Checkpoint.tensor
    monkeypatch.setattr(checkpoint.Checkpoint, "tensor", lambda self, name: read.append(name) or tensor(self, name))
    run_world(1, lambda parallel: load_directory(tmp_path, parallel=parallel))
    assert any("q_proj" in name for name in read)
    read.clear()
    run_world(2, lambda parallel: load_directory(tmp_path, parallel=parallel))
    assert read
    assert all(name.endswith("norm.weight") for name in read)


def test_only_the_first_rank_reports_tensors_that_nobody_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = SHAPES["llama, all biases, linear rope"][1] | {"intermediate_size": 57}
    reference_model("Llama", fields).save_pretrained(tmp_path)  # its output biases are rank 0's alone
    run_world(3, lambda parallel: load_directory(tmp_path, parallel=parallel))
    assert "ignored tensors" not in caplog.text


def test_the_dtype_does_not_depend_on_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    from minivllm_plugin.models import loader

    family, fields = SHAPES["qwen3, heads wider than hidden, untied"]
    architecture = reference_model(family, fields).config.to_dict() | {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16"}
    source = ModelSource.from_architecture(architecture)

    def one(parallel: ParallelContext) -> LoadedModel:
        return load_model(source, load_format="dummy", parallel=parallel)

    [whole] = run_world(1, one)
    parameters = sum(parameter.numel() for parameter in whole.module.parameters())
    for limit, dtype in ((parameters + 1, torch.float32), (parameters, torch.bfloat16)):
        monkeypatch.setattr(loader, "FLOAT32_PARAMETERS_ON_CPU", limit)
        assert [loaded.dtype for loaded in (*run_world(1, one), *run_world(4, one))] == [dtype] * 5


@pytest.mark.parametrize(
    ("model", "size", "what"),
    [
        ("smollm2-135m", 2, r"num_kv_heads=3 neither divides by it nor divides it; sizes that work are 1, 3"),
        ("smollm2-135m", 9, r"intermediate_size=1536 does not divide by it; sizes that work are 1, 3"),
        ("qwen3-0.6b", 32, r"num_heads=16 does not divide by it; sizes that work are 1, 2, 4, 8, 16"),
    ],
)
def test_what_does_not_divide_is_refused_with_what_would(model: str, size: int, what: str) -> None:
    config = describe_model(resolve(model), load_format="dummy").config
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size={size} does not go with this model: {what}$"):
        check_partition(config, size)


def test_sizes_that_work_are_those_that_divide() -> None:
    config = describe_model(resolve("qwen3-0.6b"), load_format="dummy").config
    assert partition_sizes(config) == [1, 2, 4, 8, 16]  # 16 query heads, 8 KV heads, 3072 columns
    assert partition_sizes(replace(config, num_kv_heads=1, num_heads=6, intermediate_size=36)) == [1, 2, 3, 6]
