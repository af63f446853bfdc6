"""Parsers of what a model writes, by name: tool calls, reasoning, and chat templates on the way in.

The forms of a parser are in :mod:`minivllm_plugin.parsing.records`. An engine chooses by its settings ``tool_call_parser``,
``reasoning_parser`` and ``chat_template``; a fresh parser is made for every answer, on the caller's thread.
"""

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions.registry import BUILTIN, Registry, RegistryGroup
from minivllm_plugin.parsing.reasoning import ThinkParser
from minivllm_plugin.parsing.records import ReasoningParser, ToolParser
from minivllm_plugin.parsing.tools import HermesToolParser, JsonToolParser

if TYPE_CHECKING:
    from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["ParserRegistry", "ReasoningParserFactory", "ToolParserFactory"]

ToolParserFactory = Callable[["Tokenizer | None", Collection[str]], ToolParser]
"""From the tokenizer and the names of the request's tools."""

ReasoningParserFactory = Callable[["Tokenizer | None", bool], ReasoningParser]
"""From the tokenizer and whether the prompt has already opened the reasoning."""


class _ToolParsers(Registry[ToolParserFactory]):
    kind = "tool parser"

    def add(self, name: str, factory: ToolParserFactory) -> None:
        _check_factory(self.kind, name, factory)
        self._put(name, factory)


class _ReasoningParsers(Registry[ReasoningParserFactory]):
    kind = "reasoning parser"

    def add(self, name: str, factory: ReasoningParserFactory) -> None:
        _check_factory(self.kind, name, factory)
        self._put(name, factory)


class _ChatTemplates(Registry[str]):
    kind = "chat template"

    def add(self, name: str, template: str) -> None:
        if not isinstance(template, str) or not template.strip():
            raise ConfigError(f"{self.kind} {name!r} must be Jinja text, got {template!r:.100}")
        self._put(name, template)


class ParserRegistry(RegistryGroup):
    """Three tables, each with names of its own; all errors are ConfigError.

    Attributes:
        tool_parsers, reasoning_parsers: ``add(name, factory)``; the factory makes a parser for one answer.
        chat_templates: ``add(name, text)``, Jinja text; ``LLM(…, chat_template=name)`` uses it.
    """

    @classmethod
    def builtin(cls) -> "ParserRegistry":
        """With ``hermes``, ``json`` and ``think``."""
        registry = cls()
        with registry.owned_by(BUILTIN):
            registry.tool_parsers.add("hermes", lambda tokenizer, names: HermesToolParser())
            registry.tool_parsers.add("json", lambda tokenizer, names: JsonToolParser(names))
            registry.reasoning_parsers.add("think", lambda tokenizer, is_open: ThinkParser(is_open=is_open))
        return registry

    def __init__(self) -> None:
        self.tool_parsers = _ToolParsers()
        self.reasoning_parsers = _ReasoningParsers()
        self.chat_templates = _ChatTemplates()
        super().__init__(self.tool_parsers, self.reasoning_parsers, self.chat_templates)

    def chat_template(self, wanted: str | None, of_model: Sequence[str] = ()) -> str | None:
        """The Jinja text that an engine's ``chat_template`` setting stands for.

        Args:
            wanted: a name of ours, one of the model's own (which comes first, and is returned as it is), Jinja text, or None.
            of_model: names of the model's own templates.

        Raises:
            ConfigError: it is none of these: a name that nobody knows, without a single brace in it.
        """
        if wanted is None or wanted in of_model:
            return wanted
        registered = self.chat_templates.get(wanted)
        if registered is not None:
            return registered
        if "{" not in wanted:
            known = ", ".join([*of_model, *self.chat_templates.names()]) or "none"
            raise ConfigError(
                f"chat_template={wanted!r:.100} is neither Jinja text nor a template's name; known names are {known}"
            )
        return wanted


def _check_factory(kind: str, name: str, factory: object) -> None:
    if not callable(factory):
        raise ConfigError(f"{kind} {name!r} must be a function that makes one, or a class, got {factory!r:.100}")
