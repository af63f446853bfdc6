"""The package as it is installed: found by its entry point, and light to import."""

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from minivllm_fair_share import FairShare

from minivllm_plugin.cli import main
from minivllm_plugin.testing import scripted_llm


def test_the_engine_finds_it_by_name() -> None:
    assert entry_points(group="minivllm")["fair-share"].load() is FairShare
    llm, _ = scripted_llm(options={"policies": ["fair-share"]})
    with llm:
        (report,) = llm.plugins()
    assert (report.name, report.distribution, report.is_policy) == ("fair-share", "minivllm-fair-share", True)
    assert {"order_waiting", "select_victims", "blocks_changed", "register_models"} <= set(report.hooks)


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, minivllm_fair_share; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_its_command_stands_beside_ours(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINIVLLM_PLUGINS", "fair-share")
    with pytest.raises(SystemExit) as end:
        main(["fair-share"])
    assert not end.value.code
    assert capsys.readouterr().out == "everybody else: 1\n"
