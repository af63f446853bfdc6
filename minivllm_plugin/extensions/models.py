"""Model architectures by the name that a checkpoint's ``config.json`` gives. Plugins add theirs beside ours.

A class given by its path is imported only when a checkpoint asks for it, so a broken one stops nobody else. Architectures of
plugins run on plain torch, through the ops of :mod:`minivllm_kernels`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm_plugin.errors import ConfigError, ModelError, ModelLoadError, UnsupportedModelError
from minivllm_plugin.extensions.dotted import check_path, import_path
from minivllm_plugin.extensions.registry import BUILTIN, Registry
from minivllm_plugin.models import ARCHITECTURES

if TYPE_CHECKING:
    from minivllm_plugin.models.config import ModelConfig
    from minivllm_plugin.models.decoder import CausalLM

__all__ = ["Architecture", "ConfigReader", "ModelRegistry"]

ConfigReader = Callable[[Mapping[str, Any]], "ModelConfig"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One entry.

    Attributes:
        model: a subclass of :class:`~minivllm_plugin.models.decoder.CausalLM`, or anything with its constructor, ``forward`` and
            ``compute_logits``; or where it is, as ``"package.module:Class"``.
        config_reader: ``config.json`` -> ModelConfig, for an architecture whose file has other fields, or that may have what
            :meth:`ModelConfig.from_hf` refuses; None takes that.
    """

    model: "type[CausalLM] | str"
    config_reader: ConfigReader | None = None


class ModelRegistry(Registry[Architecture]):
    """Architecture name -> class."""

    kind = "model architecture"

    @classmethod
    def builtin(cls) -> "ModelRegistry":
        """With our own architectures."""
        registry = cls()
        with registry.owned_by(BUILTIN):
            for name, path in ARCHITECTURES.items():
                registry.add(name, path)
        return registry

    def add(self, name: str, model: "type[CausalLM] | str", *, config_reader: ConfigReader | None = None) -> None:
        """Compute checkpoints of architecture ``name`` with ``model``; see :class:`Architecture`.

        Raises:
            ConfigError: the name is taken, or ``model`` is neither a class nor a path.
        """
        if isinstance(model, str):
            check_path(model, f"the class of {self.kind} {name!r}")
        elif not isinstance(model, type):
            raise ConfigError(f"{self.kind} {name!r} must be a class or its path 'package.module:Class', got {model!r:.100}")
        if config_reader is not None and not callable(config_reader):
            raise ConfigError(f"config_reader of {self.kind} {name!r} must be a function, got {config_reader!r:.100}")
        self._put(name, Architecture(model, config_reader))

    def architecture_class(self, name: str) -> "type[CausalLM]":
        """The class that computes architecture ``name``, imported if need be.

        Raises:
            UnsupportedModelError: there is none (those that there are are listed), or its module cannot be imported.
        """
        entry = self.get(name)
        if entry is None:
            raise UnsupportedModelError(self._unknown(name))
        if not isinstance(entry.model, str):
            return entry.model
        try:
            found = import_path(entry.model)
        except Exception as error:  # a plugin's module, which may raise anything
            raise UnsupportedModelError(
                f"{self.describe(name)} cannot be imported from {entry.model!r}: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(found, type):
            raise UnsupportedModelError(f"{self.describe(name)}: {entry.model!r} is no class, but {found!r:.100}")
        return found

    def read_config(self, config: Mapping[str, Any]) -> "ModelConfig":
        """The geometry that a ``config.json`` tells: of the first of its ``architectures`` that is known here.

        Raises:
            UnsupportedModelError, ModelLoadError: as :meth:`ModelConfig.from_hf`; or the plugin's reader failed.
        """
        from minivllm_plugin.models.config import ModelConfig, architecture_of

        name = architecture_of(config, self.names())
        entry = self.get(name)
        if entry is None or entry.config_reader is None:
            return ModelConfig.from_hf(config, known=self.names())
        try:
            read = entry.config_reader(config)
        except ModelError:
            raise
        except Exception as error:  # a plugin's own code
            raise ModelLoadError(f"{self.describe(name)} cannot read config.json: {type(error).__name__}: {error}") from error
        if not isinstance(read, ModelConfig) or read.architecture != name:
            raise ModelLoadError(
                f"{self.describe(name)}: config_reader must return a ModelConfig with architecture={name!r}, got {read!r:.200}"
            )
        return read

    def _unknown(self, name: str) -> str:
        return f"architecture {name!r} is not supported; supported are {', '.join(sorted(self.names()))}"
