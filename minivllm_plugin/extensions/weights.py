"""Readers of checkpoints that we cannot read ourselves: a file format by its suffix, a quantisation by its method's name.

Called while a model is loaded, on the thread that loads it. A failing reader is a ModelLoadError that names its plugin.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from minivllm_plugin.errors import ConfigError, MinivllmError, ModelLoadError
from minivllm_plugin.extensions.registry import Registry, RegistryGroup

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Dequantize", "NamedTensors", "ReadWeights", "WeightLoaderRegistry", "Weights", "loading_error"]

NamedTensors = Iterable[tuple[str, "Tensor"]]

OURS = (".gguf", ".safetensors")


@dataclass(frozen=True, slots=True)
class Weights:
    """What a reader found in a file.

    Attributes:
        tensors: pairs of a name, as Hugging Face checkpoints spell it, and a tensor on the CPU. Gone through once, after
            ``config`` was looked at, and not at all for ``load_format="dummy"``: a generator may open the file as late as that.
        config: the content of a ``config.json``; None if there is such a file beside this one.
    """

    tensors: NamedTensors
    config: Mapping[str, Any] | None = None


ReadWeights = Callable[[Path], Path | Weights]
"""A file -> what is in it; or a directory with config.json and safetensors, into which the reader has converted it."""

Dequantize = Callable[[Mapping[str, Any], Mapping[str, "Tensor"]], NamedTensors]
"""``quantization_config`` and the checkpoint's tensors by name (read when they are asked for) -> plain tensors by name."""


class _Formats(Registry[ReadWeights]):
    kind = "weight format"

    def add(self, suffix: str, read: ReadWeights) -> None:
        """Read model files whose name ends in ``suffix``, for example ``.npz`` (any case)."""
        if not isinstance(suffix, str) or not suffix.startswith(".") or suffix.lower() in OURS:
            raise ConfigError(f"{self.kind} {suffix!r:.100} must be a suffix such as '.npz', other than {', '.join(OURS)}")
        _check_function(self.kind, suffix, read)
        self._put(suffix.lower(), read)


class _Quantizations(Registry[Dequantize]):
    kind = "quantisation"

    def add(self, method: str, dequantize: Dequantize) -> None:
        """Read checkpoints whose ``quantization_config`` says ``quant_method: method``."""
        _check_function(self.kind, method, dequantize)
        self._put(method, dequantize)


class WeightLoaderRegistry(RegistryGroup):
    """Two tables; all errors are ConfigError.

    Attributes:
        formats: ``add(suffix, read)``; see :data:`ReadWeights`.
        quantizations: ``add(method, dequantize)``; see :data:`Dequantize`.
    """

    def __init__(self) -> None:
        self.formats = _Formats()
        self.quantizations = _Quantizations()
        super().__init__(self.formats, self.quantizations)

    def suffix_of(self, path: str) -> str | None:
        """The registered suffix that ``path`` ends in, the longest if there are several."""
        return max((name for name in self.formats.names() if path.lower().endswith(name)), key=len, default=None)

    def file_in(self, directory: Path) -> Path | None:
        """The one file of a registered format in a model's directory; None if there is none.

        Raises:
            ModelLoadError: there are several.
        """
        if not len(self.formats):
            return None
        found = sorted(path for path in directory.iterdir() if path.is_file() and self.suffix_of(path.name) is not None)
        if len(found) > 1:
            names = ", ".join(path.name for path in found[:5])
            raise ModelLoadError(f"{directory} holds several files of weights ({names}): give the path of one as the model")
        return found[0] if found else None

    def read(self, path: Path) -> Path | Weights:
        """What the reader of this kind of file makes of it.

        Raises:
            ModelLoadError: it failed, or returned something else.
        """
        suffix = self.suffix_of(path.name)
        read = None if suffix is None else self.formats.get(suffix)
        if suffix is None or read is None:
            raise ModelLoadError(f"no plugin reads {path}; known formats are {', '.join(self.formats.names()) or 'none'}")
        try:
            found = read(path)
        except MinivllmError:
            raise
        except Exception as error:  # a plugin's own code
            raise loading_error(self.formats.describe(suffix), f"reading {path}", error) from error
        if isinstance(found, Weights) or (isinstance(found, Path) and found.is_dir()):
            return found
        raise ModelLoadError(f"{self.formats.describe(suffix)} must return a directory or Weights for {path}, got {found!r:.100}")


def loading_error(described: str, what: str, error: Exception) -> ModelLoadError:
    """The error that a plugin's reader failed with, as ours."""
    return ModelLoadError(f"{described} failed while {what}: {type(error).__name__}: {error}")


def _check_function(kind: str, name: str, function: object) -> None:
    if not callable(function):
        raise ConfigError(f"{kind} {name!r} must be a function, got {function!r:.100}")
