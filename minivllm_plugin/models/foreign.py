"""A model's weights from wherever they are: safetensors in its directory, or what a plugin's reader makes of other files.

Plugins give tensors by name; they are held in memory, checked like any checkpoint, and copied into the model.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from minivllm_plugin.errors import MinivllmError, ModelLoadError
from minivllm_plugin.extensions.weights import NamedTensors, WeightLoaderRegistry, Weights, loading_error
from minivllm_plugin.models.checkpoint import Checkpoint, TensorTable, open_checkpoint

__all__ = ["Quantization", "WeightsOf", "plain_config"]


@dataclass(frozen=True, slots=True)
class Quantization:
    """A checkpoint's ``quantization_config`` and the method that a plugin reads."""

    method: str
    config: Mapping[str, Any]


@dataclass(slots=True)
class WeightsOf:
    """How the tensors of one model are read.

    Attributes:
        home: the directory where configuration and tokenizer are.
        config: content of config.json if a reader brought it; None: it is in ``home``.
        quantization: set when the tensors must be turned into plain ones first.
    """

    home: Path
    loaders: WeightLoaderRegistry
    path: Path | None = None
    weights: Weights | None = None
    config: Mapping[str, Any] | None = None
    quantization: Quantization | None = field(default=None)

    @classmethod
    def file(cls, path: Path, loaders: WeightLoaderRegistry) -> "WeightsOf":
        """Of one file in a format that a plugin reads."""
        found = loaders.read(path)
        if isinstance(found, Path):
            return cls(found, loaders, path)
        return cls(path.parent, loaders, path, found, found.config)

    @classmethod
    def directory(cls, home: Path, loaders: WeightLoaderRegistry) -> "WeightsOf":
        """Of a model's directory: its safetensors, else the file in it that a plugin reads."""
        path = None if any(home.glob("*.safetensors")) else loaders.file_in(home)
        if path is None:
            return cls(home, loaders)
        found = loaders.read(path)
        return cls(found, loaders, path) if isinstance(found, Path) else cls(home, loaders, path, found)

    @property
    def is_foreign(self) -> bool:
        """Whether a plugin has a hand in it: then the files in ``home`` do not tell what the tensors are."""
        return self.weights is not None or self.quantization is not None

    @contextmanager
    def open(self) -> Iterator[Checkpoint]:
        """The tensors, by name.

        Raises:
            ModelLoadError: they cannot be read; names the plugin if it was one.
        """
        with ExitStack() as stack:
            if self.weights is None:
                checkpoint = stack.enter_context(open_checkpoint(self.home))
            else:
                assert self.path is not None
                suffix = self.loaders.suffix_of(self.path.name) or self.path.suffix
                described = self.loaders.formats.describe(suffix)
                checkpoint = self._table(self.weights.tensors, described, f"reading {self.path}", self.path.name)
            if self.quantization is not None:
                method = self.quantization.method
                described = self.loaders.quantizations.describe(method)
                dequantize = self.loaders.quantizations.get(method)
                assert dequantize is not None
                try:
                    plain = dequantize(self.quantization.config, _Tensors(checkpoint))
                except MinivllmError:
                    raise
                except Exception as error:  # a plugin's own code
                    raise loading_error(described, f"reading {self.home}", error) from error
                checkpoint = self._table(plain, described, f"reading {self.home}", f"what {method!r} made")
            yield checkpoint

    def _table(self, tensors: NamedTensors, described: str, what: str, source: str) -> TensorTable:
        table: dict[str, Tensor] = {}
        try:
            for name, tensor in tensors:
                if not isinstance(name, str) or not isinstance(tensor, Tensor):
                    raise TypeError(f"it must give pairs of a name and a tensor, got {name!r:.100} and {type(tensor).__name__}")
                if name in table:
                    raise ValueError(f"it gives tensor {name!r} twice")
                table[name] = tensor
        except MinivllmError:
            raise
        except Exception as error:  # a plugin's own code
            raise loading_error(described, what, error) from error
        if not table:
            raise ModelLoadError(f"{described} found no tensor while {what}")
        return TensorTable(self.home, table, source)


class _Tensors(Mapping[str, Tensor]):
    """A checkpoint as plugins see it: each tensor is read when it is asked for."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._checkpoint.files:
            raise KeyError(name)
        return self._checkpoint.tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.files)

    def __len__(self) -> int:
        return len(self._checkpoint.files)


def plain_config(config: Mapping[str, Any], loaders: WeightLoaderRegistry) -> tuple[Mapping[str, Any], Quantization | None]:
    """A ``config.json`` without its ``quantization_config``, and that, if a plugin reads its method; else as it was."""
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping):
        return config, None
    method = quantization.get("quant_method")
    if not isinstance(method, str) or method not in loaders.quantizations:
        return config, None
    return {name: value for name, value in config.items() if name != "quantization_config"}, Quantization(method, quantization)
