"""Which format a model's tool calls and reasoning have: by name, or found in its chat template.

Ours are ``hermes`` and ``json`` for tool calls and ``think`` for reasoning; plugins add theirs
(``minivllm_register_parsers``).
"""

from collections.abc import Collection

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions.parsers import ParserRegistry
from minivllm_plugin.parsing.records import ReasoningParser, ToolParser
from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["OutputFormats"]

HERMES_TAG = "<tool_call>"
THINK_TAG = "<think>"


class OutputFormats:
    """The formats of one model.

    Args:
        parsers: what there is.
        tool_call_parser, reasoning_parser: names, ``auto`` or ``none``.
        chat_template: of the model, or what replaces it; None for a model without one.

    Raises:
        ConfigError: a name that nobody knows.
    """

    def __init__(
        self, parsers: ParserRegistry, *, tool_call_parser: str, reasoning_parser: str, chat_template: str | None
    ) -> None:
        template = chat_template or ""
        self.tool_format = tool_call_parser if tool_call_parser != "auto" else _tool_format(template)
        self.reasoning_format = reasoning_parser if reasoning_parser != "auto" else _reasoning_format(template)
        self._parsers = parsers
        for what, name, known in (
            ("tool_call_parser", self.tool_format, parsers.tool_parsers.names()),
            ("reasoning_parser", self.reasoning_format, parsers.reasoning_parsers.names()),
        ):
            if name != "none" and name not in known:
                raise ConfigError(f"{what}={name!r} is unknown; known are auto, none, {', '.join(known)}")

    def tool_parser(self, names: Collection[str], tokenizer: Tokenizer | None) -> ToolParser | None:
        """A parser for one answer to a request with tools of these names; None if calls are not looked for."""
        if self.tool_format == "none":
            return None
        factory = self._parsers.tool_parsers.get(self.tool_format)
        assert factory is not None
        return factory(tokenizer, names)

    def reasoning_parser(self, prompt_end: str, tokenizer: Tokenizer | None) -> ReasoningParser | None:
        """A parser for one answer; ``prompt_end`` is the last of the prompt's text. None if reasoning is not looked for."""
        if self.reasoning_format == "none":
            return None
        factory = self._parsers.reasoning_parsers.get(self.reasoning_format)
        assert factory is not None
        return factory(tokenizer, prompt_end.rstrip().endswith(THINK_TAG))


def _tool_format(template: str) -> str:
    """Llama's templates ask for bare JSON with ``parameters``; all others that know tools, and those that do not, use tags."""
    return "json" if HERMES_TAG not in template and "tools" in template and '"parameters"' in template else "hermes"


def _reasoning_format(template: str) -> str:
    return "think" if THINK_TAG in template or "</think>" in template else "none"
