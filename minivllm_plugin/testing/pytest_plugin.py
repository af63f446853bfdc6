"""The conformance kit inside pytest: ``pytest -p minivllm_plugin.testing.pytest_plugin --minivllm-plugin NAME``.

``NAME`` is an installed plugin's entry point, one of ours, or a path such as ``acme.plugin:Acme``; it may be given several times.
Without files among the arguments only the checks run, else they run beside the tests. A project that wants the option always
writes ``pytest_plugins = ["minivllm_plugin.testing.pytest_plugin"]`` into its topmost ``conftest.py``.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from minivllm_plugin.testing.candidates import Candidate
from minivllm_plugin.testing.conformance import CHECKS, ConformanceError, report_import

__all__ = [
    "ConformanceItem",
    "ConformanceSuite",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_terminal_summary",
]


class ConformanceSuite(pytest.Collector):
    """All checks of one plugin."""

    def __init__(self, *, plugin: str, **options: Any) -> None:
        super().__init__(**options)
        self.candidate = Candidate.find(plugin)

    def collect(self) -> "Iterator[ConformanceItem]":
        for check in CHECKS:
            yield ConformanceItem.from_parent(self, name=check)


class ConformanceItem(pytest.Item):
    """One check of one plugin."""

    def runtest(self) -> None:
        assert isinstance(self.parent, ConformanceSuite)
        CHECKS[self.name](self.parent.candidate)

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """A sentence for the author of the plugin; a traceback only for what no check foresaw."""
        if isinstance(excinfo.value, ConformanceError):
            return f"{self.nodeid}: {excinfo.value}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.config.rootpath, None, self.nodeid


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("minivllm").addoption(
        "--minivllm-plugin",
        action="append",
        default=[],
        metavar="NAME",
        help="run the conformance checks of minivllm-plugin on this plugin: a name, or package.module:Class",
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without arguments pytest would run all tests of the project: those are not what was asked for."""
    only_checks = config.getoption("minivllm_plugin") and config.args_source is not pytest.Config.ArgsSource.ARGS
    return True if only_checks else None


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    for name in config.getoption("minivllm_plugin"):
        suite = ConformanceSuite.from_parent(session, name=name, nodeid=f"minivllm-plugin[{name}]", plugin=name)
        items.extend(suite.collect())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    names = config.getoption("minivllm_plugin")
    if not names:
        return
    terminalreporter.section("imports of minivllm plugins")
    for name in names:
        try:
            terminalreporter.line(report_import(Candidate.find(name)))
        except Exception as error:  # reported by its check already
            terminalreporter.line(f"plugin {name!r}: {str(error).splitlines()[-1]}")
