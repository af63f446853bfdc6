"""The engine and its test kit are pure Python: they work where torch is not installed, and start in no time."""

import pkgutil
import subprocess
import sys

import pytest

import minivllm_plugin.engine
import minivllm_plugin.testing

HEAVY = ("torch", "numpy", "transformers", "litellm", "gradio", "huggingface_hub", "tokenizers", "jinja2", "minivllm_kernels")


def modules_of(package: str) -> list[str]:
    found = sys.modules[package]
    names = [module.name for module in pkgutil.iter_modules(found.__path__)]
    return [package, *(f"{package}.{name}" for name in names if name not in ("live", "logits"))]  # loaded when asked for


@pytest.mark.parametrize("package", ["minivllm_plugin.engine", "minivllm_plugin.testing"])
def test_nothing_heavy_is_loaded(package: str) -> None:
    modules = modules_of(package)
    assert len(modules) >= 5
    script = (
        "import importlib, sys\n"
        f"for name in {HEAVY!r}:\n"
        "    sys.modules[name] = None\n"  # importing it now raises ImportError, even inside a try
        f"for name in {modules!r}:\n"
        "    module = importlib.import_module(name)\n"
        "    for public in set(getattr(module, '__all__', ())) - set(getattr(module, '_HEAVY', ())):\n"
        "        getattr(module, public)\n"
        f"print([name for name in {HEAVY!r} if sys.modules[name] is not None])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_the_kit_exports_what_it_names() -> None:
    for name in minivllm_plugin.testing.__all__:
        assert getattr(minivllm_plugin.testing, name).__doc__ or name == "ChooseToken"
    assert sorted(minivllm_plugin.testing.__all__) == minivllm_plugin.testing.__all__
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = minivllm_plugin.testing.no_such_name
