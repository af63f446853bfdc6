"""Makes the helper modules of this folder importable; pytest's importlib mode puts no test folder on ``sys.path``."""

import importlib.util
import sys
from pathlib import Path


def _helper(name: str) -> None:
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


_helper("tiny_models")
_helper("tiny_gguf")
