"""What the documentation shows is run: Python blocks as programs, shell lines against the commands that exist, links.

All Python blocks of a page form one program, run in a process of its own with the real model. A block that cannot run here
(a GPU, a model from the hub) stands after the line ``<!-- no-run -->``.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main
from side_by_side import started

from minivllm_plugin.cli import app

ROOT = Path(__file__).parents[1]
PAGES = [
    page for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))) if page.is_file()
]
NO_RUN = "<!-- no-run -->"
FENCE = re.compile(r"^```(\w*)\s*$")
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
RUN_BLOCKS = """
import json, sys
namespace = {"__name__": "__main__"}
for page, line, code in json.load(sys.stdin):
    exec(compile("\\n" * line + code, page, "exec"), namespace)
"""


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, its first line's number (0-based) and its text."""

    language: str
    line: int
    text: str


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, without those after a no-run mark."""
    found: list[Block] = []
    language: str | None = None
    start, skip = 0, False
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines):
        fence = FENCE.match(line)
        if fence and language is None:
            before = next((text.strip() for text in reversed(lines[:number]) if text.strip()), "")
            language, start, skip = fence.group(1), number + 1, before == NO_RUN
        elif fence and language is not None:
            if not skip:
                found.append(Block(language, start, "\n".join(lines[start:number]) + "\n"))
            language = None
    assert language is None, f"{page.name}: the block of line {start} never ends"
    return found


def identify(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def done(
    request: pytest.FixtureRequest, smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Path, "Future[subprocess.CompletedProcess[str]]"]]:
    """The programs of the pages, on their way."""
    folder = tmp_path_factory.mktemp("pages")

    def run(page: Path) -> "subprocess.CompletedProcess[str]":
        program = json.dumps([(str(page), block.line, block.text) for block in blocks(page) if block.language == "python"])
        own = folder / str(PAGES.index(page))
        own.mkdir()
        command = [sys.executable, "-c", RUN_BLOCKS]
        return subprocess.run(command, input=program, capture_output=True, text=True, cwd=own, env=os.environ, timeout=300)

    with started(request, "page", run) as futures:
        yield futures


@pytest.mark.model
@pytest.mark.parametrize("page", [page for page in PAGES if any(b.language == "python" for b in blocks(page))], ids=identify)
def test_python_blocks_run(page: Path, done: dict[Path, "Future[subprocess.CompletedProcess[str]]"]) -> None:
    result = done[page].result()
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"


def shell_lines() -> list[tuple[str, str]]:
    """Every command of every shell block, with its page."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        for block in blocks(page):
            if block.language in ("bash", "sh", "console", "shell"):
                found += [
                    (identify(page), line.removeprefix("$ ").strip())
                    for line in block.text.replace("\\\n", " ").splitlines()
                    if line.strip() and not line.lstrip().startswith("#")
                ]
    return found


@pytest.mark.parametrize(("page", "line"), shell_lines() or [("none", "")])
def test_shell_lines_name_things_that_exist(page: str, line: str) -> None:
    words = shlex.split(line, comments=True)
    while words and "=" in words[0]:  # settings before the command
        words.pop(0)
    if not words:
        return
    if words[0].startswith("scripts/"):
        assert os.access(ROOT / words[0], os.X_OK), f"{page}: {words[0]} is not an executable here"
    elif words[0] == "python" and len(words) > 1 and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file(), f"{page}: no {words[1]}"
    elif words[0] == "minivllm":
        check_minivllm(words[1:])


def check_minivllm(words: list[str]) -> None:
    """The subcommand and each option exist."""
    program = typer.main.get_command(app)
    if not words or words[0].startswith("-"):
        return
    command = program.commands[words[0]]  # type: ignore[attr-defined]  # a group has commands
    while hasattr(command, "commands"):  # a group of commands, such as bench: the next word names one of them
        words = words[1:]
        command = command.commands[words[0]]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {"--help", "-h"}
    unknown = [word for word in words[1:] if re.match(r"--?[a-z]", word) and word.split("=")[0] not in known]
    assert unknown == [], f"minivllm {words[0]} has no {unknown}"


@pytest.mark.parametrize("page", PAGES, ids=identify)
def test_links_lead_to_files(page: Path) -> None:
    broken = [target for target in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / target).exists()]
    assert broken == []
