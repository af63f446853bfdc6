"""Parsers of what a model writes, by name: tool calls, reasoning, and chat templates on the way in.

This is the registry and the form of a parser. Chat templates are used by ``chat_template="name"`` of an engine; who turns
a name into tool calls or reasoning makes a fresh parser per request, on the caller's thread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions.registry import Registry, RegistryGroup

if TYPE_CHECKING:
    from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = [
    "ParsedReasoning",
    "ParsedTools",
    "ParserRegistry",
    "ReasoningParser",
    "ReasoningParserFactory",
    "ToolCall",
    "ToolParser",
    "ToolParserFactory",
]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that a model wrote. ``arguments`` is JSON text, as in OpenAI's API; ``id`` may be left to the caller."""

    name: str
    arguments: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ParsedTools:
    """A text without the tool calls in it, and these. While streaming: what is new since the last delta."""

    text: str
    calls: Sequence[ToolCall] = field(default=())


@dataclass(frozen=True, slots=True)
class ParsedReasoning:
    """A text divided into reasoning and answer. While streaming: what is new of either."""

    reasoning: str
    text: str


class ToolParser(Protocol):
    """Finds tool calls in the text of one request. Made anew for each; one thread at a time."""

    def parse(self, text: str) -> ParsedTools:
        """All at once: the whole text of a request."""
        ...

    def feed(self, delta: str) -> ParsedTools:
        """Piece by piece. A call is handed out once, whole; text that may become one is held back."""
        ...

    def finish(self) -> ParsedTools:
        """After the last delta: what was held back."""
        ...


class ReasoningParser(Protocol):
    """Divides the text of one request into reasoning and answer. Made anew for each; one thread at a time."""

    def parse(self, text: str) -> ParsedReasoning:
        """All at once: the whole text of a request."""
        ...

    def feed(self, delta: str) -> ParsedReasoning:
        """Piece by piece; a tag that is cut in two is held back."""
        ...

    def finish(self) -> ParsedReasoning:
        """After the last delta: what was held back."""
        ...


ToolParserFactory = Callable[["Tokenizer"], ToolParser]
ReasoningParserFactory = Callable[["Tokenizer"], ReasoningParser]


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
        tool_parsers, reasoning_parsers: ``add(name, factory)``; the factory makes a parser for one request from the tokenizer.
        chat_templates: ``add(name, text)``, Jinja text; ``LLM(…, chat_template=name)`` uses it.
    """

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
        raise ConfigError(f"{kind} {name!r} must be a function of the tokenizer, or a class, got {factory!r:.100}")
