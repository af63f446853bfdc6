"""Which tools a call brings and whether the model may, must or must not call them. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError

__all__ = ["TOOLS", "ToolPlan", "wanted_tools"]

TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """Tools of one call.

    Attributes:
        tools: in OpenAI's form; empty when there are none, or when they must not be called.
        must_call: the answer is a call.
        only: of this function.
        parallel: several calls are allowed in one answer.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    must_call: bool = False
    only: str | None = None
    parallel: bool = True

    def takes_call(self, index: int) -> bool:
        """Whether call ``index`` of an answer is handed on: without ``parallel`` only the first one is."""
        return self.parallel or index == 0


def wanted_tools(wanted: Mapping[str, Any]) -> ToolPlan:
    """
    Raises:
        InvalidRequestError: malformed, or a choice without tools.
        UnsupportedFeatureError: a tool that is no function, or another kind of choice.
    """
    tools = _tools(wanted.get("tools"))
    parallel = wanted.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        raise InvalidRequestError(f"parallel_tool_calls must be True or False, got {parallel!r:.100}")
    choice = wanted.get("tool_choice", "auto")
    if choice in ("auto", "none"):
        return ToolPlan(tools if choice == "auto" else (), parallel=parallel)
    if not tools:
        raise InvalidRequestError(f"tool_choice={choice!r:.100} needs tools; give some, or leave tool_choice out")
    if choice in ("required", "any"):  # the second is Anthropic's and Mistral's word
        return ToolPlan(tools, must_call=True, parallel=parallel)
    name = _chosen(choice)
    known = [tool["function"]["name"] for tool in tools]
    if name not in known:
        raise InvalidRequestError(f"tool_choice names {name!r}, but the tools are {', '.join(known)}")
    return ToolPlan(tools, must_call=True, only=name, parallel=False)


def _tools(tools: Any) -> tuple[Mapping[str, Any], ...]:
    if tools is None:
        return ()
    if isinstance(tools, str | Mapping) or not isinstance(tools, list | tuple):
        raise InvalidRequestError(f"tools must be a list, got {tools!r:.100}")
    plain = [tool.model_dump() if hasattr(tool, "model_dump") else tool for tool in tools]
    names: list[str] = []
    for index, tool in enumerate(plain):
        kind = tool.get("type", "function") if isinstance(tool, Mapping) else None
        if isinstance(kind, str) and kind != "function":
            raise UnsupportedFeatureError(f"tools[{index}] is of type {kind!r}; only functions are supported")
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise InvalidRequestError(
                f'tools[{index}] must be {{"type": "function", "function": {{"name": …, "parameters": …}}}}, got {tool!r:.200}'
            )
        names.append(function["name"])
    double = next((name for name in names if names.count(name) > 1), None)
    if double is not None:
        raise InvalidRequestError(f"two tools are called {double!r}; a call could not say which is meant")
    return tuple(plain)


def _chosen(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if isinstance(name, str):
        return name
    if isinstance(choice, Mapping) and choice.get("type") not in ("function", None):
        kind = choice["type"]
        raise UnsupportedFeatureError(f"tool_choice of type {kind!r} is not supported; use auto, none, required or a function")
    raise InvalidRequestError(
        f'tool_choice must be auto, none, required or {{"type": "function", "function": {{"name": …}}}}, got {choice!r:.100}'
    )
