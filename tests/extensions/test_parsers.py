"""Parsers by name, and chat templates by name in an engine."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions.parsers import ParserRegistry
from minivllm_plugin.hookspecs import hookimpl
from minivllm_plugin.parsing.records import ToolCall, ToolCallDelta, ToolDelta, collect_calls
from minivllm_plugin.testing import scripted_llm


class LineTools:
    """A tool call is a line ``!name arguments``."""

    def __init__(self, tokenizer: object, names: object) -> None:
        self.held = ""
        self.num_calls = 0

    def feed(self, text: str) -> ToolDelta:
        whole, _, self.held = (self.held + text).rpartition("\n")
        return self._parse(whole)

    def finish(self) -> ToolDelta:
        return self._parse(self.held)

    def _parse(self, text: str) -> ToolDelta:
        calls = []
        for line in text.splitlines():
            if line.startswith("!"):
                name, _, arguments = line[1:].partition(" ")
                calls.append(ToolCallDelta(self.num_calls, name, arguments))
                self.num_calls += 1
        return ToolDelta("\n".join(line for line in text.splitlines() if not line.startswith("!")), tuple(calls))


def test_parsers_are_found_by_name_and_made_per_answer() -> None:
    registry = ParserRegistry()
    with registry.owned_by("acme"):
        registry.tool_parsers.add("lines", LineTools)
    make = registry.tool_parsers.get("lines")
    assert make is not None
    parser = make(None, ["get_weather"])
    assert make(None, []) is not parser
    streamed = [*map(parser.feed, ["h", "i\n!get", "_weather {}\n"]), parser.finish()]
    assert "".join(part.text for part in streamed) == "hi"
    assert collect_calls([call for part in streamed for call in part.calls]) == [ToolCall("get_weather", "{}")]
    assert registry.tool_parsers.owner("lines") == "acme"


def test_an_engine_takes_a_plugins_parser_by_name() -> None:
    class Lines:
        @hookimpl
        def minivllm_register_parsers(self, registry: ParserRegistry) -> None:
            registry.tool_parsers.add("lines", LineTools)

    llm, _ = scripted_llm(options={"plugins": [Lines()], "tool_call_parser": "lines"})
    with llm:
        answer = llm.output_parser(tools=[{"type": "function", "function": {"name": "f"}}]).parse("!f {}")
        assert answer.calls == [ToolCall("f", "{}")]
    with pytest.raises(ConfigError, match=r"tool_call_parser='lines' is unknown; known are auto, none, hermes, json"):
        scripted_llm(options={"tool_call_parser": "lines"})


def test_what_is_no_parser_is_refused() -> None:
    registry = ParserRegistry()
    with pytest.raises(ConfigError, match="tool parser 'x' must be a function that makes one"):
        registry.tool_parsers.add("x", "module:name")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="reasoning parser 'x' must be a function"):
        registry.reasoning_parsers.add("x", None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="chat template 'x' must be Jinja text"):
        registry.chat_templates.add("x", "  ")


def test_which_text_a_template_setting_means() -> None:
    registry = ParserRegistry()
    registry.chat_templates.add("shout", "{{ messages[0].content | upper }}")
    assert registry.chat_template(None) is None
    assert registry.chat_template("shout") == "{{ messages[0].content | upper }}"
    assert registry.chat_template("shout", ("default", "shout")) == "shout"  # the model's own of that name comes first
    assert registry.chat_template("{{ messages }}") == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"chat_template='shuot' is neither.*known names are tool_use, shout"):
        registry.chat_template("shuot", ("tool_use",))


class Templates:
    @hookimpl
    def minivllm_register_parsers(self, registry: ParserRegistry) -> None:
        registry.chat_templates.add("just-the-text", "{% for message in messages %}{{ message.content }}{% endfor %}")


@pytest.mark.model
def test_a_plugins_template_is_used_by_its_name(smollm2_gguf: Path, tmp_path: Path) -> None:
    from minivllm_plugin.models.catalog import resolve
    from minivllm_plugin.models.loader import describe_model

    directory = describe_model(resolve(str(smollm2_gguf))).directory
    assert directory is not None
    for file in directory.glob("*.json"):
        shutil.copy(file, tmp_path)
    options: dict[str, Any] = {"load_format": "dummy", "num_blocks": 4}
    with LLM(str(tmp_path), chat_template="just-the-text", plugins=[Templates()], **options) as llm:
        assert llm.tokenizer is not None
        prompt = llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=1), use_tqdm=False)[
            0
        ].prompt_token_ids
        assert prompt == llm.tokenizer.encode("hello")
    with pytest.raises(ConfigError, match="chat_template='just-the-txt' is neither Jinja text nor"):
        LLM(str(tmp_path), chat_template="just-the-txt", plugins=[Templates()], **options)


def test_an_engine_without_a_tokenizer_starts_with_a_named_template() -> None:
    llm, _ = scripted_llm(options={"plugins": [Templates()], "chat_template": "just-the-text"})
    with llm:
        assert llm.is_healthy
