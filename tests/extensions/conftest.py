"""Makes the tiny models of ``tests/models`` importable here, too."""

import importlib.util
import sys
from pathlib import Path

if "tiny_models" not in sys.modules:
    spec = importlib.util.spec_from_file_location("tiny_models", Path(__file__).parents[1] / "models" / "tiny_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["tiny_models"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
