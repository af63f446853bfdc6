"""``__all__`` is the truth: it exists, its names resolve, and nothing public is missing from it."""

import importlib
import inspect
import pkgutil
from types import ModuleType

import pytest

import minivllm_adapters
import minivllm_kernels
import minivllm_plugin
import minivllm_ui

PACKAGES = (minivllm_plugin, minivllm_kernels, minivllm_adapters, minivllm_ui)
OPTIONAL = ("gradio", "triton", "flash_attn", "litellm")  # a backend or adapter may need what is not installed here
MODULES = sorted(
    [package.__name__ for package in PACKAGES]
    + [info.name for package in PACKAGES for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")]
)


def load(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] in OPTIONAL:
            pytest.skip(f"{error.name} is not installed")
        raise


def defined_here(module: ModuleType) -> set[str]:
    """Public functions and classes written in this very module."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isfunction(value) or inspect.isclass(value))
        and value.__module__ == module.__name__
        and value.__name__ == name
    }


@pytest.mark.parametrize("name", MODULES)
def test_all_tells_the_truth(name: str) -> None:
    module = load(name)
    public = defined_here(module)
    names = getattr(module, "__all__", None)
    if names is None:
        assert public == set(), f"{name} defines public names but has no __all__"
        return
    assert len(names) == len(set(names))
    assert [entry for entry in names if not hasattr(module, entry)] == []
    assert sorted(public - set(names)) == [], f"{name}: name these in __all__, or start them with an underscore"


def test_the_package_lists_its_lazy_names() -> None:
    assert set(minivllm_plugin.__all__) <= set(dir(minivllm_plugin))
    with pytest.raises(AttributeError, match="no_such_name"):
        minivllm_plugin.no_such_name  # noqa: B018  # the access is the test


def test_every_module_says_what_it_is() -> None:
    undocumented = [name for name in MODULES if not (load(name).__doc__ or "").strip()]
    assert undocumented == []
