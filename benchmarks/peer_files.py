"""The files that peers load: made once from this engine's copy of the model, kept in its cache under ``peers``."""

import json
import subprocess
import sys
from pathlib import Path

from minivllm_plugin.models.catalog import resolve
from minivllm_plugin.models.loader import describe_model
from minivllm_plugin.models.pull import cache_directory, ensure_local

__all__ = ["SCRIPTS", "gguf_file", "safetensors_directory"]

SCRIPTS = Path(__file__).parent / "peers"
SECONDS = 1800


def gguf_file(model: str, name: str, *, dummy: bool, llama_cpp: str | None) -> str:
    """``model`` as a GGUF in format ``name``.

    Args:
        dummy: random weights of this shape instead of the model's own.
        llama_cpp: Python of an environment with llama-cpp-python, whose quantiser makes the format.
    """
    directory = cache_directory() / "peers"
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{Path(model).name}{'-dummy' if dummy else ''}"
    target = directory / f"{stem}-{name}.gguf"
    if target.is_file():
        return str(target)
    source = _dummy_file(model, directory / f"{stem}-F16.gguf") if dummy else ensure_local(resolve(model))
    if source == target:
        return str(target)
    if source.suffix != ".gguf":
        raise SystemExit(f"{model} is no GGUF, so there is nothing to make {name} from; with --dummy its shape is used")
    if llama_cpp is None:
        raise SystemExit(f"{name} of {model} is made by llama.cpp's quantiser; name its Python with --llama-cpp")
    _call([llama_cpp, str(SCRIPTS / "make_gguf.py"), str(source), str(target), name])
    return str(target)


def safetensors_directory(model: str, *, dummy: bool) -> str:
    """``model`` as a directory in Hugging Face's layout; with ``dummy`` it holds the configuration only."""
    if not dummy:
        return str(describe_model(resolve(model)).directory)
    directory = cache_directory() / "peers" / f"{Path(model).name}-dummy"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(_architecture(model)))
    return str(directory)


def _dummy_file(model: str, target: Path) -> Path:
    if not target.is_file():
        _architecture(model)
        _call([sys.executable, str(SCRIPTS / "dummy_gguf.py"), model, str(target)])
    return target


def _architecture(model: str) -> dict[str, object]:
    architecture = resolve(model).architecture
    if architecture is None:
        raise SystemExit(f"--dummy needs a model whose shape is in the catalog, and {model} is not; see `minivllm models`")
    return dict(architecture)


def _call(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        raise SystemExit(f"{Path(command[1]).name} failed:\n{done.stderr[-2000:]}")
