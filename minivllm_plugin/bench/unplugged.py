"""The engine without its seam for plugins: the same source with every question "does a plugin listen?" taken out.

What such an engine costs a step is what an engine with no plugin is compared with. It is derived from the modules as they
are, so it cannot go stale; nothing but the benchmark uses it.
"""

import ast
import importlib
import inspect
from functools import cache
from types import ModuleType

__all__ = ["SEAM", "num_questions", "unplugged_engine"]

# An ``if`` that looks at one of these exists for plugins only, and none of them has an ``else``.
SEAM = frozenset({"_hooks", "_observer", "observer", "_steering", "log", "prepare_taking", "stop_check"})
MODULES = ("block_manager", "scheduler", "llm_engine")


@cache
def unplugged_engine() -> tuple[type, type]:
    """``(Scheduler, LLMEngine)`` without the seam; otherwise as :mod:`minivllm_plugin.engine` has them."""
    pool, scheduler, engine = (_stripped(name)[0] for name in MODULES)
    scheduler.__dict__["BlockManager"] = pool.__dict__["BlockManager"]
    return scheduler.__dict__["Scheduler"], engine.__dict__["LLMEngine"]


def num_questions() -> dict[str, int]:
    """Module -> how many places of its source ask for plugins."""
    return {name: _stripped(name)[1] for name in MODULES}


def _stripped(name: str) -> tuple[ModuleType, int]:
    original = importlib.import_module(f"minivllm_plugin.engine.{name}")
    tree = ast.parse(inspect.getsource(original))
    strip = _Strip()
    tree = ast.fix_missing_locations(strip.visit(tree))
    module = ModuleType(f"{original.__name__} without plugins")
    module.__dict__["__name__"] = original.__name__  # dataclasses look their module up by it
    exec(compile(tree, f"<{original.__name__} without plugins>", "exec"), module.__dict__)
    return module, strip.num_questions


class _Strip(ast.NodeTransformer):
    """Drops the questions, what is asked or timed for them alone, and the refusal of calls from inside a hook."""

    def __init__(self) -> None:
        self.num_questions = 0

    def visit_If(self, node: ast.If) -> ast.AST | None:  # ast's name
        if _names(node.test) & SEAM and not node.orelse:
            self.num_questions += 1
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        is_time = isinstance(node.targets[0], ast.Name) and ast.unparse(node.value) == "self.clock()"
        return ast.copy_location(ast.Pass(), node) if is_time else node

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return ast.copy_location(ast.Pass(), node) if ast.unparse(node.value) == "self._refuse_reentry()" else node


def _names(test: ast.expr) -> set[str]:
    return {node.attr for node in ast.walk(test) if isinstance(node, ast.Attribute)} | {
        node.id for node in ast.walk(test) if isinstance(node, ast.Name)
    }
