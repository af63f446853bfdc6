"""From a :class:`ModelSource` to a module ready to compute: files found, dtype chosen, every parameter filled.

Runs once per engine, on the thread that builds it. Fetching is :mod:`minivllm_plugin.models.pull`'s, reading GGUF is
:mod:`minivllm_plugin.models.gguf`'s, other formats and quantised tensors are plugins' (:mod:`minivllm_plugin.models.foreign`);
what arrives here is a directory of safetensors, tensors by name, or an architecture to be filled with seeded noise.
"""

import logging
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from minivllm_plugin.errors import ConfigError, ModelLoadError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.models.checkpoint import fill_parameters, read_json, stacked
from minivllm_plugin.models.config import ModelConfig, token_ids
from minivllm_plugin.models.decoder import CausalLM
from minivllm_plugin.models.foreign import WeightsOf, plain_config
from minivllm_plugin.models.layers import parameter_sources
from minivllm_plugin.parallel.context import SINGLE, ParallelContext
from minivllm_plugin.parallel.partition import check_partition, rank_config

if TYPE_CHECKING:
    from minivllm_plugin.models.catalog import ModelSource

__all__ = ["LoadedModel", "ModelDescription", "describe_model", "load_model"]

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LOAD_FORMATS = ("auto", "dummy")
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Up to this size a CPU runs float32: the memory is affordable, and bfloat16 is slower on most CPUs.
FLOAT32_PARAMETERS_ON_CPU = 1_000_000_000
DUMMY_STD = 0.02


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode, without gradients, on its device.

    Attributes:
        module: the decoder; ``forward`` and ``compute_logits`` are documented at :class:`CausalLM`.
        config: with every end-of-turn id that config.json or generation_config.json names.
        dtype: of all parameters.
        directory: where the tokenizer's files are; None when there are none.
        generation_defaults: those of temperature, top_p, top_k and min_p that generation_config.json sets.
        parallel: which part of the model this is; :data:`SINGLE` is the whole.
    """

    module: CausalLM
    config: ModelConfig
    dtype: torch.dtype
    directory: Path | None
    generation_defaults: Mapping[str, float]
    parallel: ParallelContext = SINGLE

    @property
    def cache_config(self) -> ModelConfig:
        """``config`` with the number of KV heads that are cached here: the shape of this rank's K/V cache."""
        return rank_config(self.config, self.parallel.size)


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """What is known of a model before any weight is read.

    Attributes:
        config: with every end-of-turn id that config.json or generation_config.json names.
        directory: where its files are, fetched and converted; None for an architecture without files.
        generation_defaults: those of temperature, top_p, top_k and min_p that generation_config.json sets.
        weights: how its tensors are read; None when there are none.
    """

    config: ModelConfig
    directory: Path | None
    generation_defaults: Mapping[str, float]
    weights: WeightsOf | None = field(default=None, compare=False)

    @property
    def tokenizer_directory(self) -> Path | None:
        """Where the tokenizer's files are; None when there are none."""
        if self.directory is None or not any((self.directory / name).is_file() for name in TOKENIZER_FILES):
            return None
        return self.directory


def describe_model(source: "ModelSource", *, load_format: str = "auto", extensions: Extensions | None = None) -> ModelDescription:
    """Fetch and convert where needed, and read what the files say. With ``dummy`` a catalog name touches no file.

    Args:
        extensions: architectures and weight loaders; None has the built-in ones.

    Raises:
        ConfigError: ``load_format`` is unknown.
        ModelDownloadError, ModelLoadError, UnsupportedModelError: the model cannot be fetched, read or computed.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format={load_format!r} is unknown; use one of {', '.join(LOAD_FORMATS)}")
    extensions = extensions or Extensions.builtin()
    if load_format == "dummy" or source.kind == "dummy":
        if source.architecture is not None:
            return ModelDescription(extensions.models.read_config(source.architecture), None, {})
        if source.kind not in ("directory", "gguf", "file"):
            raise ModelLoadError(
                f"load_format='dummy' needs the architecture of {source.name!r}, which is not in the catalog; "
                "use a catalog name or a directory with a config.json"
            )
    weights = WeightsOf.file(Path(source.location), extensions.weights) if source.kind == "file" else None
    if weights is None:
        weights = WeightsOf.directory(_directory(source), extensions.weights)
    content = weights.config if weights.config is not None else read_json(weights.home / "config.json")
    content, weights.quantization = plain_config(content, extensions.weights)
    config, defaults = _with_generation_config(extensions.models.read_config(content), weights.home)
    return ModelDescription(config, weights.home, defaults, weights)


def load_model(
    source: "ModelSource",
    *,
    dtype: str = "auto",
    device: str = "cpu",
    load_format: str = "auto",
    seed: int = 0,
    max_positions: int | None = None,
    extensions: Extensions | None = None,
    description: ModelDescription | None = None,
    parallel: ParallelContext = SINGLE,
) -> LoadedModel:
    """Load ``source``, fetching and converting first where needed.

    Args:
        dtype: ``float32``, ``bfloat16``, ``float16``, or ``auto``: the checkpoint's, except that a CPU runs models under
            10^9 parameters in float32.
        device: anything ``torch.device`` takes.
        load_format: ``auto`` reads the weights; ``dummy`` fills the architecture with noise and, for names in the catalog,
            touches neither network nor disk.
        seed: of the noise. The same seed gives the same weights on every device and number of threads.
        max_positions: no sequence will be longer; bounds the rotary table of models with a very long context.
        extensions: architectures and weight loaders; None has the built-in ones.
        description: what :func:`describe_model` said with the same ``load_format`` and ``extensions``, if it was asked before.
        parallel: the rank whose part of the model is loaded.

    Raises:
        ConfigError: an argument is impossible, or the model cannot be shared by so many ranks.
        ModelDownloadError, ModelLoadError, UnsupportedModelError: the model cannot be fetched, read or computed.
    """
    extensions = extensions or Extensions.builtin()
    description = description or describe_model(source, load_format=load_format, extensions=extensions)
    target, config = _device(device), description.config
    check_partition(config, parallel.size)
    module = _build(extensions.models.architecture_class(config.architecture), config, max_positions, parallel)
    chosen = _choose_dtype(dtype, config, module, target)
    if load_format == "dummy" or description.weights is None:
        _fill_with_noise(module, chosen, target, seed)
    else:
        with description.weights.open() as checkpoint:
            first = parallel.rank == 0
            fill_parameters(module, checkpoint, dtype=chosen, device=target, tied=config.tie_word_embeddings, report=first)
    module.to(target)  # the rotary table; the parameters are there already
    module.eval()
    return LoadedModel(module, config, chosen, description.tokenizer_directory, description.generation_defaults, parallel)


def _fill_with_noise(module: CausalLM, dtype: torch.dtype, device: torch.device, seed: int) -> None:
    for source in parameter_sources(module):
        # Seeded by name: neither the order of the layers nor the device plays a part. torch uses 32 bits of a seed.
        # A rank makes the noise of the whole layer, so that its part is what one rank alone would have there.
        generator = torch.Generator("cpu").manual_seed(zlib.crc32(f"{seed}/{source.tensor}".encode()))
        noise = torch.empty(source.whole[0].shape).normal_(0.0, DUMMY_STD, generator=generator)
        if source.tensor.endswith("norm.weight"):
            noise += 1.0  # a norm scales by its weight: around 1, as in a trained model
        source.set(stacked((part.of(noise) for part in source.whole), source.parameter.shape, dtype, device))


def _device(device: str) -> torch.device:
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device={device!r} is not a device torch knows: {error}") from error


def _directory(source: "ModelSource") -> Path:
    """A directory with config.json and safetensors: fetched, and converted when it is a GGUF."""
    from minivllm_plugin.models.pull import cache_directory, ensure_local

    path = ensure_local(source)
    if path.is_dir():
        return path
    from minivllm_plugin.models.gguf import convert

    return convert(path, cache_directory() / "converted")


def _with_generation_config(config: ModelConfig, directory: Path) -> tuple[ModelConfig, dict[str, float]]:
    """config.json completed by generation_config.json, and the latter's sampling defaults."""
    path = directory / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    ends = token_ids(generation.get("eos_token_id"), f"eos_token_id in {path}")
    defaults: dict[str, float] = {}
    for name in SAMPLING_DEFAULTS:
        value: Any = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{name} in {path} must be a number, got {value!r}")
        defaults[name] = value
    return replace(config, eos_token_ids=tuple(dict.fromkeys((*ends, *config.eos_token_ids)))), defaults


def _build(architecture: type[CausalLM], config: ModelConfig, max_positions: int | None, parallel: ParallelContext) -> CausalLM:
    """The module with parameters that have a shape and no memory yet."""
    if max_positions is not None:
        config = replace(config, max_position_embeddings=min(max_positions, config.max_position_embeddings))
    with torch.device("meta"):
        # A plugin's architecture may know nothing of ranks, and is computed by one (minivllm_plugin.parallel.ranks).
        return architecture(config) if parallel.size == 1 else architecture(config, parallel)


def _choose_dtype(dtype: str, config: ModelConfig, module: nn.Module, device: torch.device) -> torch.dtype:
    if dtype not in (*DTYPES, "auto"):
        raise ConfigError(f"dtype={dtype!r} is unknown; use one of auto, {', '.join(DTYPES)}")
    parameters = sum(math.prod(source.whole[0].shape) for source in parameter_sources(module))  # of all ranks together
    if dtype != "auto":
        name, reason = dtype, "asked for"
    elif device.type == "cpu" and parameters < FLOAT32_PARAMETERS_ON_CPU:
        name, reason = "float32", f"dtype='auto' on a CPU with {parameters / 1e6:.0f} M parameters"
    else:
        name, reason = config.dtype, "the checkpoint's"
    if name != config.dtype:
        logger.info("weights are used as %s (%s); the checkpoint has %s", name, reason, config.dtype)
    return DTYPES[name]
