"""The rooms and the arrows between them (docs/architecture.md): who may import whom, and what a bare import loads."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = {
    "minivllm_kernels": ROOT / "kernels" / "minivllm_kernels",
    "minivllm_plugin": ROOT / "minivllm_plugin",
    "minivllm_adapters": ROOT / "adapters" / "minivllm_adapters",
    "minivllm_ui": ROOT / "ui" / "minivllm_ui",
}
# Top-level packages that a room must never import, not even for type checking or inside a function.
FORBIDDEN = {
    "minivllm_kernels": {"minivllm_plugin", "minivllm_adapters", "minivllm_ui", "litellm", "gradio", "transformers"},
    "minivllm_plugin": {"minivllm_adapters", "minivllm_ui", "litellm", "gradio"},
    "minivllm_adapters": {"minivllm_ui", "gradio"},
    "minivllm_ui": {"minivllm_adapters"},
}
ENGINE = ROOMS["minivllm_plugin"] / "engine"
ENGINE_MAY_IMPORT = {
    "xxhash",
    "minivllm_plugin.config",
    "minivllm_plugin.engine",
    "minivllm_plugin.errors",
    "minivllm_plugin.events",
    "minivllm_plugin.hookspecs",
    "minivllm_plugin.sampling_parameters",
    "minivllm_plugin.views",
}
HEAVY = ("torch", "transformers", "litellm", "gradio", "tokenizers", "huggingface_hub", "numpy")


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and full name of every import in a file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield node.lineno, str(node.module)


@pytest.mark.parametrize("room", list(ROOMS))
def test_no_room_imports_what_it_must_not(room: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted(ROOMS[room].rglob("*.py"))
        for line, name in imports(path)
        if name.split(".")[0] in FORBIDDEN[room]
    ]
    assert found == []


def test_the_engine_is_pure_python() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in sorted(ENGINE.rglob("*.py"))
        for line, name in imports(path)
        if name.split(".")[0] not in sys.stdlib_module_names
        and not any(name == allowed or name.startswith(f"{allowed}.") for allowed in ENGINE_MAY_IMPORT)
    ]
    assert found == []


def test_the_outer_folders_are_no_packages() -> None:
    # A top-level package named kernels would shadow the one transformers imports.
    assert [name for name in ("kernels", "adapters", "ui", "tests") if (ROOT / name / "__init__.py").exists()] == []
    assert [room for room, folder in ROOMS.items() if not (folder / "py.typed").exists()] == []


def loaded_by(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after ``code``."""
    probe = f"{code}\nimport sys\nprint('LOADED', *(name for name in {HEAVY!r} if name in sys.modules))"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV_")}
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.strip().splitlines()[-1].split()[1:])


@pytest.mark.parametrize(
    "module",
    [
        "minivllm_plugin",
        "minivllm_plugin.cli",
        "minivllm_plugin.models.catalog",
        "minivllm_plugin.models.pull",
        "minivllm_adapters",
        "minivllm_adapters.autoload",
    ],
)
def test_light_modules_load_nothing_heavy(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


def test_the_whole_engine_loads_without_torch() -> None:
    modules = [f"minivllm_plugin.engine.{path.stem}" for path in sorted(ENGINE.glob("*.py")) if path.stem != "__init__"]
    assert modules
    assert loaded_by("\n".join(f"import {name}" for name in modules)) == set()
