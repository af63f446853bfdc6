"""Which runner computes a model, and in which types: decided once, from the settings, the shape and the machine.

On a CPU the compiled kernels are preferred; what they cannot do goes to plain torch, with one line that says why.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch

from minivllm_kernels.dispatch import BackendTable, why_not
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.llm_engine import Runner
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.models.catalog import ModelSource
from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.models.loader import ModelDescription, load_model
from minivllm_plugin.runner.explaining import warn_of_plain_torch
from minivllm_plugin.runner.kv_cache import plan_num_blocks
from minivllm_plugin.runner.model_runner import ModelRunner
from minivllm_plugin.runner.runner_settings import RunnerSettings

__all__ = ["Backend", "build_backend"]

logger = logging.getLogger(__name__)

CPU_CACHE_KINDS = ("float32", "bfloat16", "int8")


@dataclass(frozen=True, slots=True)
class Backend:
    """A runner with its pool.

    Attributes:
        num_blocks: what the runner allocated; the scheduler is built with this number.
        kernels: ``cpu`` (compiled) or ``torch``.
        dtype: of the weights: float32, bfloat16, float16, int8 or int4.
    """

    runner: Runner
    num_blocks: int
    cache_bytes: int
    kernels: str
    dtype: str


@dataclass(frozen=True, slots=True)
class _Kinds:
    weights: str
    cache: str


def build_backend(
    config: EngineConfig,
    source: ModelSource,
    description: ModelDescription,
    device: str,
    ends: Collection[int],
    extensions: Extensions | None = None,
) -> Backend:
    """Load the weights and take the memory of the pool. ``extensions``: those that ``description`` was made with.

    Raises:
        ConfigError: something was asked for by name that this machine or model cannot do.
        ModelError: the weights cannot be read.
    """
    extensions = extensions or Extensions.builtin()
    kinds = _kinds(config, description.config)
    table = extensions.attention.table()
    extensions.attention.report(table, torch.device(device).type)
    reason = None
    if config.tensor_parallel_size > 1:
        reason = f"tensor_parallel_size={config.tensor_parallel_size} shares a model out, and they compute a whole one"
    reason = reason or _why_not_cpu_kernels(config, description.config, device, kinds)
    reason = reason or extensions.attention.instead_of_whole_steps(table, device)
    if reason is None:
        return _cpu_backend(config, source, description, kinds, ends, extensions, table)
    for name in ("quantization", "kv_cache_dtype"):
        asked = getattr(config, name)
        if asked in ("int8", "int4"):
            raise ConfigError(
                f"{name}={asked!r} needs the compiled CPU kernels, which cannot be used: {reason}; leave it at 'auto'"
            )
    if device == "cpu":
        logger.warning("the CPU kernels are not used: %s; plain torch computes instead, which is slower", reason)
    if config.tensor_parallel_size > 1:
        return _parallel_backend(config, source, description, device, ends, extensions)
    return _torch_backend(config, source, description, device, ends, extensions, table)


def _kinds(config: EngineConfig, model: ModelConfig) -> _Kinds:
    if config.quantization in ("int8", "int4"):
        weights = config.quantization
    elif config.quantization == "auto" and config.dtype == "auto":
        weights = "int8"
    elif config.dtype == "bfloat16":
        weights = "bfloat16_dot"  # activations are rounded too, as in other engines
    elif model.dtype == "bfloat16":
        weights = "bfloat16"  # the checkpoint's exact values at half the traffic, computed in float32
    else:
        weights = "float32"
    exact = config.dtype == "float32" or (config.dtype == "auto" and config.quantization == "none")
    cache = config.kv_cache_dtype if config.kv_cache_dtype != "auto" else "float32" if exact else "bfloat16"
    return _Kinds(weights, cache)


def _why_not_cpu_kernels(config: EngineConfig, model: ModelConfig, device: str, kinds: _Kinds) -> str | None:
    if device != "cpu":
        return f"the device is {device}"
    if config.dtype == "float16":
        return "dtype='float16' is not among their types (float32, bfloat16, int8, int4)"
    if config.kv_cache_dtype not in ("auto", *CPU_CACHE_KINDS):
        return f"kv_cache_dtype={config.kv_cache_dtype!r} is not among their types ({', '.join(CPU_CACHE_KINDS)})"
    from minivllm_plugin.runner.cpu_weights import SUPPORTED_ARCHITECTURES, decoder_geometry

    if model.architecture not in SUPPORTED_ARCHITECTURES:
        return f"they do not know {model.architecture}"
    from minivllm_kernels.cpu.decoder import unsupported

    return unsupported(decoder_geometry(model), config.block_size, kinds.cache) or why_not("cpu", device)


def _cpu_backend(
    config: EngineConfig,
    source: ModelSource,
    description: ModelDescription,
    kinds: _Kinds,
    ends: Collection[int],
    extensions: Extensions,
    table: BackendTable | None,
) -> Backend:
    from minivllm_kernels.cpu.decoder import CpuDecoder
    from minivllm_plugin.models.layers import RotaryTable
    from minivllm_plugin.runner.cpu_runner import CpuRunner
    from minivllm_plugin.runner.cpu_weights import decoder_geometry, packed_weights

    model = description.config
    num_blocks = plan_num_blocks(config, model, kinds.cache)
    weights = packed_weights(
        source, description, kinds.weights, load_format=config.load_format, seed=config.seed, extensions=extensions
    )
    positions = min(config.max_model_len or model.max_position_embeddings, num_blocks * config.block_size)
    try:
        decoder = CpuDecoder(
            decoder_geometry(model),
            weights,
            RotaryTable(model.rope, model.head_dim, positions).cos_sin,
            num_blocks=num_blocks,
            block_size=config.block_size,
            cache_kind=kinds.cache,
            threads=config.num_threads or torch.get_num_threads(),
        )
    except (RuntimeError, MemoryError, TypeError) as error:  # torch's allocator says no in all of these ways
        raise ConfigError(
            f"no memory for num_blocks={num_blocks} KV blocks of {config.block_size} tokens; lower num_blocks or kv_cache_bytes"
        ) from error
    return Backend(CpuRunner(decoder, ends, table), num_blocks, decoder.pool.num_bytes, "cpu", kinds.weights.removesuffix("_dot"))


def _torch_backend(
    config: EngineConfig,
    source: ModelSource,
    description: ModelDescription,
    device: str,
    ends: Collection[int],
    extensions: Extensions,
    table: BackendTable | None,
) -> Backend:
    model = load_model(
        source,
        dtype=config.dtype,
        device=device,
        load_format=config.load_format,
        seed=config.seed,
        max_positions=config.max_model_len,
        extensions=extensions,
        description=description,
    )
    runner = ModelRunner(model, ends, table, settings=RunnerSettings.of(config))
    cache = runner.allocate_kv_cache(runner.plan_num_blocks(config), config.block_size)
    if device != "cpu":
        warn_of_plain_torch(runner.choices(), device)
    runner.capture_graphs()
    return Backend(runner, cache.num_blocks, cache.num_bytes, "torch", str(model.dtype).removeprefix("torch."))


def _parallel_backend(
    config: EngineConfig,
    source: ModelSource,
    description: ModelDescription,
    device: str,
    ends: Collection[int],
    extensions: Extensions,
) -> Backend:
    from minivllm_plugin.parallel.start import start_ranks

    runner = start_ranks(config, source, description, device, ends, extensions)
    return Backend(runner, runner.cache.num_blocks, runner.cache.num_bytes, "torch", runner.dtype)
