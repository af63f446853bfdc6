"""Weight loaders of plugins: files by suffix, quantised tensors by method, through the whole engine; and how they fail."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import PLAIN_LLAMA, SOME_TOKENS, edit_config, is_right, load_directory, reference_model
from torch import Tensor

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import ConfigError, ModelError, ModelLoadError, ModelNotFoundError, UnsupportedModelError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.extensions.weights import WeightLoaderRegistry, Weights
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.models.catalog import ModelSource
from minivllm_plugin.models.loader import load_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
KERNEL_SHAPE = {**PLAIN_LLAMA, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def read_npz(path: Path) -> Weights:
    """Arrays under the tensors' names, and the configuration as JSON text under ``config``, unless it stands beside the file."""
    with np.load(path) as arrays:
        config = json.loads(str(arrays["config"])) if "config" in arrays else None

    def tensors() -> Iterator[tuple[str, Tensor]]:
        with np.load(path) as arrays:
            for name in arrays.files:
                if name != "config":
                    yield name, torch.from_numpy(arrays[name])

    return Weights(tensors(), config)


def dequantize(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Toy quantisation: a matrix is int8 with one scale a row under ``<name>.scale``, times ``gain``."""
    for name in tensors:
        if name.endswith(".scale"):
            continue
        tensor = tensors[name]
        if tensor.dtype == torch.int8:
            tensor = tensor.float() * tensors[f"{name}.scale"].unsqueeze(1) * config["gain"]
        yield name, tensor


class Plugin:
    minivllm_name = "readers"

    def __init__(self, read: Any = read_npz, toy: Any = dequantize) -> None:
        self.read, self.toy = read, toy

    @hookimpl
    def minivllm_register_weight_loaders(self, registry: WeightLoaderRegistry) -> None:
        registry.formats.add(".npz", self.read)
        registry.quantizations.add("toy", self.toy)


def save_npz(directory: Path, name: str, *, with_config: bool) -> Path:
    """The directory's safetensors as one .npz beside them; they are removed."""
    arrays: dict[str, Any] = {key: tensor.numpy() for key, tensor in load_file(directory / "model.safetensors").items()}
    if with_config:
        arrays["config"] = np.array((directory / "config.json").read_text())
    np.savez(directory / name, **arrays)
    (directory / "model.safetensors").unlink()
    return directory / name


def quantize(directory: Path) -> None:
    """The directory's matrices in the toy format; what it can hold exactly stands there afterwards."""
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if tensor.ndim == 2:
            scale = tensor.abs().amax(dim=1) / 127
            tensors[name] = (tensor / scale.unsqueeze(1)).round().to(torch.int8)
            tensors[f"{name}.scale"] = scale / 2
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    edit_config(directory, quantization_config={"quant_method": "toy", "gain": 2})


def answer(model: Path, *plugins: Any, **options: Any) -> list[int]:
    with LLM(str(model), plugins=list(plugins), **{"dtype": "float32", **options}) as llm:
        return llm.generate([SOME_TOKENS], GREEDY, use_tqdm=False)[0].outputs[0].token_ids


@pytest.fixture(params=["for torch", "for the compiled kernels"])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    reference_model("Llama", KERNEL_SHAPE if "compiled" in request.param else {**PLAIN_LLAMA, "head_dim": 10}).save_pretrained(
        tmp_path
    )
    return tmp_path


@pytest.mark.parametrize("with_config", [True, False])
def test_a_file_of_a_registered_suffix_is_a_model(model: Path, with_config: bool, empty_cache: Path) -> None:
    expected = answer(model)
    file = save_npz(model, "weights.NPZ.npz", with_config=with_config)
    if with_config:
        (model / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"is not a \.gguf file"):
        LLM(str(file))
    for _ in range(2):
        assert answer(file, Plugin()) == expected


def test_a_directory_whose_only_weights_are_such_a_file_is_one_too(model: Path, empty_cache: Path) -> None:
    expected = answer(model)
    save_npz(model, "weights.npz", with_config=False)
    assert answer(model, Plugin()) == expected
    arrays = dict(np.load(model / "weights.npz"))
    arrays["lm_head.weight"] = -arrays["lm_head.weight"]
    np.savez(model / "weights.npz", **arrays)
    assert answer(model, Plugin()) != expected  # packed weights of the compiled kernels are not kept from the first time
    (model / "more.npz").write_bytes(b"")
    with pytest.raises(ModelLoadError, match=r"several files of weights \(more.npz, weights.npz\)"):
        answer(model, Plugin())


def test_safetensors_come_first(model: Path) -> None:
    expected = answer(model)
    (model / "rubbish.npz").write_bytes(b"no archive")
    assert answer(model, Plugin()) == expected


def test_a_reader_may_convert_into_a_directory(model: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    expected = answer(model)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "model.npz"
    elsewhere.write_bytes(b"whatever")
    assert answer(elsewhere, Plugin(read=lambda path: model)) == expected


def test_a_dummy_model_takes_the_shape_from_a_file_and_reads_no_tensor(model: Path) -> None:
    def read(path: Path) -> Weights:
        def tensors() -> Iterator[tuple[str, Tensor]]:
            raise AssertionError("the tensors were read")
            yield

        return Weights(tensors(), json.loads((model / "config.json").read_text()))

    file = model / "shape.npz"
    file.write_bytes(b"")
    assert len(answer(file, Plugin(read=read), load_format="dummy")) == 6


def broken(path: Path) -> Weights:
    raise OSError("bad magic")


def late(path: Path) -> Weights:
    found = read_npz(path)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(found.tensors))
        raise OSError("cut short")

    return Weights(tensors(), found.config)


READERS: dict[str, tuple[Any, type[ModelError], str]] = {
    "raises": (broken, ModelLoadError, r"weight format '.npz' of plugin 'readers' failed while reading .*OSError: bad magic"),
    "raises late": (late, ModelLoadError, r"weight format '.npz' of plugin 'readers' failed while reading .*OSError: cut short"),
    "returns nothing": (lambda path: None, ModelLoadError, r"'readers' must return a directory or Weights .*got None"),
    "gives no tensor": (lambda path: Weights([]), ModelLoadError, "found no tensor"),
    "gives a list": (lambda path: Weights([("a", [1])]), ModelLoadError, "TypeError: it must give pairs of a name and a tensor"),
    "gives one twice": (
        lambda path: Weights([("a", torch.zeros(1)), ("a", torch.zeros(1))]),
        ModelLoadError,
        "ValueError: it gives tensor 'a' twice",
    ),
    "gives another": (lambda path: Weights([("a", torch.zeros(1))]), ModelLoadError, "lacks .*model.embed_tokens.weight"),
    "gives integers": (
        lambda path: Weights([(name, tensor.to(torch.int32)) for name, tensor in read_npz(path).tensors]),
        UnsupportedModelError,
        "has type torch.int32",
    ),
    "refuses by name": (
        lambda path: (_ for _ in ()).throw(UnsupportedModelError("not that kind")),
        UnsupportedModelError,
        "^not that kind$",
    ),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_failing_reader_is_named(tmp_path: Path, reader: str) -> None:
    reference_model("Llama", PLAIN_LLAMA).save_pretrained(tmp_path)
    file = save_npz(tmp_path, "weights.npz", with_config=False)
    read, error, message = READERS[reader]
    with pytest.raises(error, match=message):
        LLM(str(file), plugins=[Plugin(read=read)])


def test_quantised_tensors_are_turned_into_plain_ones(model: Path, empty_cache: Path) -> None:
    quantize(model)
    with pytest.raises(
        UnsupportedModelError, match=r"quantization_config.quant_method='toy'.*or a plugin that reads this method"
    ):
        LLM(str(model))
    first = answer(model, Plugin())
    plain = dict(dequantize({"gain": 2}, load_file(model / "model.safetensors")))
    save_file(
        {name: tensor.contiguous() for name, tensor in plain.items()}, model / "model.safetensors", metadata={"format": "pt"}
    )
    edit_config(model, quantization_config=None)
    assert answer(model) == first


def test_the_dequantised_weights_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    reference = reference_model("Llama", PLAIN_LLAMA)
    with torch.no_grad():  # values that the toy format holds exactly
        for parameter in reference.parameters():
            if parameter.ndim == 2:
                parameter.copy_((parameter * 40).round().clamp(-126, 126))
                parameter[:, 0] = 127.0
                parameter.mul_(1 / 128)
    reference.save_pretrained(tmp_path)
    quantize(tmp_path)
    extensions = Extensions.builtin()
    extensions.weights.quantizations.add("toy", dequantize)
    loaded = load_model(ModelSource(str(tmp_path), "directory", str(tmp_path)), extensions=extensions)
    quantised = dict(dequantize({"gain": 2}, load_file(tmp_path / "model.safetensors")))
    for name, parameter in reference.named_parameters():
        assert torch.allclose(quantised[name], parameter, atol=1e-6), name
    assert loaded.config.num_layers == 2
    with pytest.raises(UnsupportedModelError):
        load_directory(tmp_path)
    edit_config(tmp_path, quantization_config=None)
    save_file({name: tensor.contiguous() for name, tensor in quantised.items()}, tmp_path / "model.safetensors")
    assert is_right(tmp_path, reference)


@pytest.mark.parametrize("late_failure", [False, True])
def test_a_failing_quantisation_is_named(tmp_path: Path, late_failure: bool) -> None:
    reference_model("Llama", PLAIN_LLAMA).save_pretrained(tmp_path)
    quantize(tmp_path)

    def fails(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        if late_failure:
            return iter([("a", tensors["no such tensor"])] for _ in (1,))  # type: ignore[return-value]
        raise KeyError("no such tensor")

    with pytest.raises(
        ModelLoadError, match=r"quantisation 'toy' of plugin 'readers' failed while reading .*KeyError: 'no such tensor'"
    ):
        LLM(str(tmp_path), plugins=[Plugin(toy=fails)])


@pytest.mark.parametrize("suffix", ["npz", "", ".gguf", ".SafeTensors", 5])
def test_what_is_no_suffix_is_refused(suffix: Any) -> None:
    with pytest.raises(ConfigError, match="must be a suffix"):
        WeightLoaderRegistry().formats.add(suffix, read_npz)


def test_loaders_are_functions_and_the_longest_suffix_wins() -> None:
    registry = WeightLoaderRegistry()
    with pytest.raises(ConfigError, match=r"weight format '\.x' must be a function"):
        registry.formats.add(".x", "module:function")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="quantisation 'x' must be a function"):
        registry.quantizations.add("x", None)  # type: ignore[arg-type]
    registry.formats.add(".npz", read_npz)
    registry.formats.add(".shard.NPZ", read_npz)
    assert [registry.suffix_of(name) for name in ("a.npz", "a.Shard.npz", "a.bin")] == [".npz", ".shard.npz", None]
    with pytest.raises(ModelLoadError, match=r"no plugin reads .*known formats are \.npz, \.shard\.npz"):
        registry.read(Path("a.bin"))
