"""Architectures of plugins: real models through the whole engine, and what is said when one cannot be had."""

import json
import sys
import types
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import PLAIN_LLAMA, SOME_TOKENS, edit_config, reference_logits, reference_model
from torch import Tensor

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import ConfigError, ModelLoadError, UnsupportedModelError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.models.decoder import Attention, DecoderLayer, GatedMLP
from minivllm_plugin.models.llama import LlamaForCausalLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class ScaledMLP(GatedMLP):
    """What the toy architecture does differently: its MLP's output counts half."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


class ToyForCausalLM(LlamaForCausalLM):
    def build_layer(self, config: ModelConfig) -> DecoderLayer:
        return DecoderLayer(config, Attention(config), ScaledMLP(config))


def read_toy(config: Mapping[str, Any]) -> ModelConfig:
    """The toy's own names of things."""
    if config.get("toy_layers") is None:
        raise KeyError("toy_layers")
    as_llama = {**config, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": config["toy_layers"], "hidden_act": "silu"}
    return replace(ModelConfig.from_hf(as_llama), architecture="ToyForCausalLM")


class Plugin:
    """Adds one architecture."""

    minivllm_name = "toys"

    def __init__(self, model: Any, name: str = "ToyForCausalLM", **options: Any) -> None:
        self.model, self.name, self.options = model, name, options

    @hookimpl
    def minivllm_register_models(self, registry: Any) -> None:
        registry.add(self.name, self.model, **self.options)


@pytest.fixture
def toy(tmp_path: Path) -> tuple[Path, Any]:
    """A saved toy and a Llama of transformers that computes the same: its MLPs' last matrices are halved."""
    reference = reference_model("Llama", PLAIN_LLAMA)
    reference.save_pretrained(tmp_path)
    edit_config(tmp_path, architectures=["ToyForCausalLM"])
    with torch.no_grad():
        for layer in reference.model.layers:
            layer.mlp.down_proj.weight.mul_(0.5)
    return tmp_path, reference


def greedy_by_hand(reference: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(reference_logits(reference, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def test_a_class_runs_through_the_whole_engine(toy: tuple[Path, Any]) -> None:
    directory, reference = toy
    with pytest.raises(UnsupportedModelError, match="architecture 'ToyForCausalLM' is not supported"):
        LLM(str(directory))
    prompts = [SOME_TOKENS, SOME_TOKENS[:2] * 5]
    options: dict[str, Any] = {"dtype": "float32", "num_blocks": 7, "block_size": 4, "max_num_batched_tokens": 5}
    with LLM(str(directory), plugins=[Plugin(ToyForCausalLM)], **options) as llm:
        assert llm.kernels == "torch"  # the compiled kernels compute only what they know
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == greedy_by_hand(reference, prompt, 8)


def test_a_path_is_imported_only_when_it_is_asked_for(toy: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    directory, reference = toy
    module = types.ModuleType("toy_models")
    module.Toy = ToyForCausalLM  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_models", module)
    with LLM(str(directory), plugins=[Plugin("toy_models:Toy")], dtype="float32") as llm:
        assert llm.generate([SOME_TOKENS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == greedy_by_hand(
            reference, SOME_TOKENS, 8
        )


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.toys:Toy", "cannot be imported from 'no_such_package.toys:Toy': ModuleNotFoundError"),
        ("minivllm_plugin.errors:NoSuchName", "cannot be imported.*AttributeError"),
        ("minivllm_plugin.errors:__all__", "is no class"),
    ],
)
def test_a_broken_path_stops_only_those_who_ask_for_it(toy: tuple[Path, Any], tmp_path: Path, path: str, message: str) -> None:
    directory, _ = toy
    with pytest.raises(UnsupportedModelError, match=f"model architecture 'ToyForCausalLM' of plugin 'toys'.*{message}"):
        LLM(str(directory), plugins=[Plugin(path)])
    edit_config(directory, architectures=["LlamaForCausalLM"])
    with LLM(str(directory), plugins=[Plugin(path)]) as llm:
        assert llm.is_healthy


def test_a_plugin_reads_its_own_config(toy: tuple[Path, Any]) -> None:
    directory, reference = toy
    content = json.loads((directory / "config.json").read_text())
    layers = content.pop("num_hidden_layers")
    (directory / "config.json").write_text(json.dumps({**content, "toy_layers": layers, "hidden_act": "toy"}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2], "temperature": 0.3}))
    with LLM(str(directory), plugins=[Plugin(ToyForCausalLM, config_reader=read_toy)], dtype="float32") as llm:
        assert llm.default_sampling_params().temperature == 0.3
        assert llm.generate([SOME_TOKENS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == greedy_by_hand(
            reference, SOME_TOKENS, 8
        )
    edit_config(directory, toy_layers=None)
    with pytest.raises(
        ModelLoadError, match=r"model architecture 'ToyForCausalLM' of plugin 'toys' cannot read config\.json: KeyError"
    ):
        LLM(str(directory), plugins=[Plugin(ToyForCausalLM, config_reader=read_toy)])
    with pytest.raises(ModelLoadError, match="must return a ModelConfig with architecture='ToyForCausalLM', got None"):
        LLM(str(directory), plugins=[Plugin(ToyForCausalLM, config_reader=lambda config: None)])


def test_dummy_weights_work_for_a_plugins_architecture(toy: tuple[Path, Any]) -> None:
    directory, _ = toy
    with LLM(str(directory), load_format="dummy", plugins=[Plugin(ToyForCausalLM)]) as llm:
        assert len(llm.generate([SOME_TOKENS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 8


def test_our_architectures_cannot_be_taken_over() -> None:
    extensions = Extensions.builtin()
    with (
        extensions.models.owned_by("toys"),
        pytest.raises(ConfigError, match="'LlamaForCausalLM' of plugin 'toys' is already there"),
    ):
        extensions.models.add("LlamaForCausalLM", ToyForCausalLM)
    for wrong in ("package.module", "a b:c", ":x", "x:", 5, ToyForCausalLM.forward):
        with pytest.raises(ConfigError, match=r"package\.module"):
            extensions.models.add("Other", wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="config_reader"):
        extensions.models.add("Other", ToyForCausalLM, config_reader=5)  # type: ignore[arg-type]
