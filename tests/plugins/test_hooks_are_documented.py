"""No hook without a test of its name, nor without its exact signature and what it costs in docs/hooks.md."""

import ast
import inspect
import re
from pathlib import Path

import pytest

from minivllm_plugin import hookspecs
from minivllm_plugin.events import BlockEvent

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "hooks.md"
HOOKS = sorted(name for name, value in vars(hookspecs).items() if inspect.isfunction(value) and name.startswith("minivllm_"))


def signature(hook: str) -> str:
    """As it stands in the source: inspect spells an alias out."""
    spelt = f"{hook}{inspect.signature(getattr(hookspecs, hook))}".replace("'", "")
    return spelt.replace(str(BlockEvent), "BlockEvent")


def simplified(text: str) -> str:
    """Without line breaks and the paths of modules, which inspect shows and people do not write."""
    text = re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", text)
    text = re.sub(r"\s+", " ", text)
    return re.sub(r"(?<=\() | (?=\))|,(?= ?\))", "", text)


def section(hook: str) -> str:
    """What the page says under the heading of one hook."""
    page = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^### `{hook}`\n(.*?)(?=^##|\Z)", page, re.MULTILINE | re.DOTALL)
    assert found is not None, f"docs/hooks.md has no heading ### `{hook}`"
    return found[1]


def test_the_list_of_hooks_is_whole() -> None:
    groups = (hookspecs.LIFECYCLE_HOOKS, hookspecs.OBSERVER_HOOKS, hookspecs.POLICY_HOOKS)
    named = [hook for group in groups for hook in group]
    assert len(named) == len(set(named))
    assert set(HOOKS) - set(named) == {hook for hook in HOOKS if hook.startswith("minivllm_register_")}
    assert set(named) <= set(HOOKS)
    assert set(HOOKS) <= set(hookspecs.__all__)
    assert len(HOOKS) == 24


def test_every_hook_is_marked() -> None:
    assert [hook for hook in HOOKS if not hasattr(getattr(hookspecs, hook), "minivllm_spec")] == []


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_has_a_test_of_its_name(hook: str) -> None:
    tree = ast.parse((ROOT / "tests" / "plugins" / "test_hooks.py").read_text(encoding="utf-8"))
    tests = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    test = tests.get(f"test_{hook}")
    assert test is not None, f"tests/plugins/test_hooks.py has no test_{hook}"
    assert any(isinstance(node, ast.Assert) for node in ast.walk(test)), f"test_{hook} asserts nothing"
    used = {node.arg for node in ast.walk(test) if isinstance(node, ast.keyword)}
    assert hook.removeprefix("minivllm_") in used, f"test_{hook} has no plugin that implements it"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_hook_stands_in_the_page_with_its_signature(hook: str) -> None:
    code = re.search(r"```python\n(.*?)```", section(hook), re.DOTALL)
    assert code is not None, f"{hook}: no block of Python with its signature"
    assert simplified(code[1]).strip() == f"def {simplified(signature(hook))}: ..."


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("word", ["When", "Thread", "Answer", "On error", "Cost"])
def test_every_hook_says_what_an_author_must_know(hook: str, word: str) -> None:
    assert re.search(rf"\*\*{word}:?\*\*", section(hook)), f"docs/hooks.md does not say {word!r} of {hook}"


@pytest.mark.parametrize("hook", HOOKS)
def test_every_docstring_says_when_and_what_it_costs(hook: str) -> None:
    text = getattr(hookspecs, hook).__doc__ or ""
    assert "When:" in text
    assert "Cost:" in text
    if hook in hookspecs.POLICY_HOOKS:
        assert "Answer:" in text or "admits" in text


def test_the_page_names_no_hook_that_does_not_exist() -> None:
    named = set(re.findall(r"\bminivllm_[a-z_]+\b", PAGE.read_text(encoding="utf-8")))
    allowed = {"minivllm_api", "minivllm_name", "minivllm_plugin", "minivllm_register_", "minivllm_waiting_window"}
    assert sorted(named - set(HOOKS) - allowed) == []
