"""benchmarks/policies.py makes the tables of docs/policies.md, and the page shows what it makes."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from minivllm_plugin.plugins.discovery import BUILTIN

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "policies.md"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("policies_benchmark", ROOT / "benchmarks" / "policies.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def table_of(name: str) -> list[list[str]]:
    """Cells of the page's table: header and rows."""
    text = PAGE.read_text(encoding="utf-8").split(f"<!-- measured {name} -->\n")[1].split("<!-- end -->")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:1] + lines[2:]]


def test_every_policy_has_a_section_a_constructor_and_a_measured_table(script: ModuleType) -> None:
    scenarios = script.scenarios(None)
    assert set(scenarios) == {"priority", "sjf", "lpm", "fair", "lcf-victim", "slru"}
    text = PAGE.read_text(encoding="utf-8")
    for name, scenario in scenarios.items():
        assert f"\n## {name}\n" in text
        assert BUILTIN[name].split(":")[1] + "(" in text
        header, *rows = table_of(name)
        assert header == ["engine", *scenario.figures]
        assert [row[0].strip("`") for row in rows] == list(scenario.variants)
        assert all(len(row) == len(header) for row in rows)


def test_the_page_shows_what_the_script_finds(script: ModuleType) -> None:
    """The quickest scenario again, whole: it must give the page's figures to the last digit."""
    scenario = script.scenarios(None)["lcf-victim"]
    made = scenario.table(scenario.rows(scenario.seeds))
    assert made in PAGE.read_text(encoding="utf-8")


def test_tables_are_written_between_their_marks(script: ModuleType, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- measured sjf -->\nold\n<!-- end -->\nafter\n<!-- measured lpm -->\n<!-- end -->\n")
    script.write_tables(page, {"sjf": r"new \1"})
    assert page.read_text() == (
        "before\n<!-- measured sjf -->\nnew \\1\n<!-- end -->\nafter\n<!-- measured lpm -->\n<!-- end -->\n"
    )
    with pytest.raises(SystemExit, match="no place for the table of 'fair'"):
        script.write_tables(page, {"fair": "table"})
