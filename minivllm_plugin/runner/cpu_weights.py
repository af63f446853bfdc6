"""A model's weights in the layout of the CPU kernels: packed once from the checkpoint, kept on disk, mapped ever after.

The packed file stands in the cache beside converted models, keyed by the checkpoint's files, the kind of weights and
:data:`VERSION`. Nothing here runs a model.
"""

import hashlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor
from torch.nn import Module

from minivllm_kernels.cpu.decoder import DecoderGeometry, DecoderWeights, LayerWeights, check_weights
from minivllm_kernels.cpu.packing import PackedMatrix, interleave_gate_up, pack_matrix
from minivllm_plugin.errors import ModelLoadError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.models.catalog import ModelSource
from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.models.decoder import CausalLM, DecoderLayer, GatedMLP
from minivllm_plugin.models.loader import ModelDescription, load_model
from minivllm_plugin.models.progress import announce
from minivllm_plugin.models.storage import cache_directory, exclusive, partial_directory, publish
from minivllm_plugin.runner.tensor_file import map_tensors, write_tensors

__all__ = ["SUPPORTED_ARCHITECTURES", "decoder_geometry", "pack_module", "packed_weights", "vocabulary_kind"]

logger = logging.getLogger(__name__)

VERSION = 1
"""Of the packed layout. Raise it when the same checkpoint would give another file."""

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
MATRICES = ("qkv", "out", "gate_up", "down")
NORMS = ("input_norm", "post_norm")
HEAD_NORMS = ("q_norm", "k_norm")  # Qwen3 has them


def decoder_geometry(config: ModelConfig) -> DecoderGeometry:
    """The shape as the kernels want it."""
    return DecoderGeometry(
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        eps=config.rms_norm_eps,
    )


def packed_weights(
    source: ModelSource,
    description: ModelDescription,
    kind: str,
    *,
    load_format: str,
    seed: int,
    extensions: Extensions | None = None,
) -> DecoderWeights:
    """The weights of ``source`` as ``kind``: mapped from the cache, or loaded, packed and put there first.

    Where they cannot be put (a full disk, a cache that is read-only), they are kept in memory, with one line that says so.

    Raises:
        ModelError: the checkpoint cannot be read, or the packed file is damaged.
    """

    def load() -> DecoderWeights:
        dtype = description.config.dtype if kind != "float32" else "float32"
        options = {"load_format": load_format, "seed": seed, "extensions": extensions, "description": description}
        return pack_module(load_model(source, dtype=dtype, max_positions=1, **options).module, kind)  # type: ignore[arg-type]

    if load_format == "dummy" or description.weights is None or description.weights.is_foreign:
        return load()  # a plugin's tensors may change with the plugin, which no key of files tells
    path = cache_directory() / "packed" / _key(description.weights.home) / f"{kind}.bin"
    if not path.is_file():
        unsaved = _pack_to(path, load)
        if unsaved is not None:
            return unsaved
    tensors = map_tensors(path)
    try:
        weights = _from_tensors(tensors, kind, description.config.num_layers)
        check_weights(decoder_geometry(description.config), weights)
    except (KeyError, ValueError) as error:
        raise ModelLoadError(
            f"packed weights in {path} are not this model's: {error}; delete the file to have it made again"
        ) from error
    return weights


def pack_module(module: CausalLM, kind: str) -> DecoderWeights:
    """Pack the parameters of a loaded model; they are not changed."""
    vocabulary = vocabulary_kind(kind)
    embedding = pack_matrix(module.model.embed_tokens.weight, vocabulary)
    return DecoderWeights(
        layers=tuple(_pack_layer(layer, kind) for layer in module.model.layers),
        embedding=embedding,
        head=embedding if module.lm_head is None else pack_matrix(module.lm_head.weight, vocabulary),
        final_norm=_norm(module.model.norm.weight),
    )


def vocabulary_kind(kind: str) -> str:
    """Kind of the embedding and the output layer: four bits are too few for them, in GGUF files as well."""
    return "int8" if kind == "int4" else kind


def _pack_layer(layer: Module, kind: str) -> LayerWeights:
    assert isinstance(layer, DecoderLayer)
    assert isinstance(layer.mlp, GatedMLP)  # these kernels are chosen for our own architectures only
    attention, mlp = layer.self_attn, layer.mlp
    gate_up_bias = mlp.gate_up_proj.bias
    return LayerWeights(
        qkv=pack_matrix(attention.qkv_proj.weight, kind, attention.qkv_proj.bias),
        out=pack_matrix(attention.o_proj.weight, kind, attention.o_proj.bias),
        gate_up=pack_matrix(
            interleave_gate_up(mlp.gate_up_proj.weight), kind, None if gate_up_bias is None else interleave_gate_up(gate_up_bias)
        ),
        down=pack_matrix(mlp.down_proj.weight, kind, mlp.down_proj.bias),
        input_norm=_norm(layer.input_layernorm.weight),
        post_norm=_norm(layer.post_attention_layernorm.weight),
        q_norm=None if attention.q_norm is None else _norm(attention.q_norm.weight),
        k_norm=None if attention.k_norm is None else _norm(attention.k_norm.weight),
    )


def _norm(weight: Tensor) -> Tensor:
    return weight.detach().float().contiguous()


def _key(directory: Path) -> str:
    parts = [str(directory.resolve()), str(VERSION)]
    for file in sorted([*directory.glob("*.safetensors*"), directory / "config.json"]):
        status = file.stat()
        parts += [file.name, str(status.st_size), str(status.st_mtime_ns)]
    return f"{directory.name}-{hashlib.sha256(os.fsencode(chr(10).join(parts))).hexdigest()[:20]}"


def _pack_to(path: Path, load: Callable[[], DecoderWeights]) -> DecoderWeights | None:
    """Put packed weights at ``path``, unless another process just did. Returns them if they cannot be written."""
    waiting = f"another process is packing weights into {path}; waiting for it"
    weights = None
    try:
        with exclusive(path.parent, on_wait=lambda: logger.info(waiting)):
            if path.is_file():
                return None
            announce(f"packing {path.stem} weights for the CPU kernels (once) ...", enabled=True)
            weights = load()
            with partial_directory(path.parent) as scratch:
                write_tensors(scratch / path.name, _to_tensors(weights))
                publish(scratch / path.name, path)
        return None
    except OSError as error:
        logger.warning(
            "packed weights cannot be kept in %s (%s), so every start packs them again; set MINIVLLM_CACHE to a directory "
            "that has room and can be written",
            path.parent,
            error,
        )
        return weights or load()


def _to_tensors(weights: DecoderWeights) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {"final_norm": weights.final_norm}
    matrices = {"embedding": weights.embedding}
    if weights.head is not weights.embedding:
        matrices["head"] = weights.head
    for index, layer in enumerate(weights.layers):
        matrices.update({f"{index}.{name}": getattr(layer, name) for name in MATRICES})
        tensors.update(
            {f"{index}.{name}": value for name in (*NORMS, *HEAD_NORMS) if (value := getattr(layer, name)) is not None}
        )
    for name, matrix in matrices.items():
        parts = {"data": matrix.data, "scale": matrix.scale, "bias": matrix.bias}
        tensors.update({f"{name}.{part}": value for part, value in parts.items() if value is not None})
    return tensors


def _from_tensors(tensors: Mapping[str, Tensor], kind: str, num_layers: int) -> DecoderWeights:
    def matrix(name: str, kind: str = kind) -> PackedMatrix:
        return PackedMatrix(kind, tensors[f"{name}.data"], tensors.get(f"{name}.scale"), tensors.get(f"{name}.bias"))

    embedding = matrix("embedding", vocabulary_kind(kind))
    return DecoderWeights(
        layers=tuple(
            LayerWeights(
                **{name: matrix(f"{index}.{name}") for name in MATRICES},  # type: ignore[arg-type]  # names and types by table
                **{name: tensors[f"{index}.{name}"] for name in NORMS},  # type: ignore[arg-type]
                **{name: tensors.get(f"{index}.{name}") for name in HEAD_NORMS},  # type: ignore[arg-type]
            )
            for index in range(num_layers)
        ),
        embedding=embedding,
        head=matrix("head", vocabulary_kind(kind)) if "head.data" in tensors else embedding,
        final_norm=tensors["final_norm"],
    )
