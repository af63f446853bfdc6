"""A command line to call in this process, and an engine that answers from a script."""

import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import minivllm_plugin
from minivllm_plugin.cli import main
from minivllm_plugin.sampling_parameters import SamplingParams

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process -> exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as caught:
            main(list(arguments))
        out, err = capsys.readouterr()
        code = caught.value.code
        return (code if isinstance(code, int) else 0 if code is None else 1), out, err

    return call


@pytest.fixture
def cache_with_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without models, but with the kernels that were compiled on this machine: that takes half a minute."""
    from minivllm_kernels.cpu.build import kernel_cache_directory

    compiled = kernel_cache_directory()
    compiled.mkdir(parents=True, exist_ok=True)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(compiled, target_is_directory=True)
    monkeypatch.setenv("MINIVLLM_CACHE", str(cache))
    return cache


class ScriptedStream:
    """Gives the words of its answer; notes that it was closed. ``interrupt_at`` raises Ctrl-C before that word."""

    def __init__(self, llm: "ScriptedLLM", prompt_tokens: int) -> None:
        self.llm = llm
        self.text = ""
        self.num_prompt_tokens = prompt_tokens

    def __enter__(self) -> "ScriptedStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[SimpleNamespace]:
        for index, word in enumerate(self.llm.answer):
            if index == self.llm.interrupt_at:
                self.llm.interrupt_at = None
                raise KeyboardInterrupt
            self.text += word
            yield SimpleNamespace(text=word, token_ids=(index,), finish_reason=None, stop_reason=None)

    def close(self) -> None:
        self.llm.closed_streams += 1

    @property
    def output(self) -> SimpleNamespace:
        completion = SimpleNamespace(text=self.text, token_ids=[1, 2], finish_reason="stop", stop_reason=None)
        return SimpleNamespace(outputs=[completion], prompt_token_ids=[0] * self.num_prompt_tokens, num_cached_tokens=1)

    def result(self) -> SimpleNamespace:
        return self.output


@dataclass
class ScriptedLLM:
    """Answers from a script and records what it was asked. ``error`` stands for every request, ``refusals`` for one each."""

    answer: list[str] = field(default_factory=lambda: ["Hel", "lo"])
    chat_template: str | None = "template"
    interrupt_at: int | None = None
    error: Exception | None = None
    refusals: list[Exception] = field(default_factory=list)
    asked: list[Any] = field(default_factory=list)
    params: list[SamplingParams] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    closed: int = 0
    closed_streams: int = 0
    model_name: str = "scripted"
    max_model_len: int = 64

    @property
    def tokenizer(self) -> SimpleNamespace:
        return SimpleNamespace(chat_template=self.chat_template)

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.25, top_k=7, max_tokens=None)

    def submit(self, prompt: Any, params: SamplingParams) -> ScriptedStream:
        self.asked.append(prompt)
        self.params.append(params)
        if self.refusals:
            raise self.refusals.pop()
        if self.error is not None:
            raise self.error
        return ScriptedStream(self, len(prompt))

    def submit_chat(self, messages: list[dict[str, str]], params: SamplingParams) -> ScriptedStream:
        return self.submit(messages, params)  # type: ignore[return-value]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> ScriptedLLM:
    scripted = ScriptedLLM()

    def load(model: str, **options: Any) -> ScriptedLLM:
        scripted.options = {"model": model, **options}
        return scripted

    monkeypatch.setattr(minivllm_plugin, "LLM", load, raising=False)
    return scripted


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A terminal at which these lines are typed; an exception class stands for its key (Ctrl-C, Ctrl-D)."""

    def type_lines(*lines: str | type[BaseException]) -> None:
        remaining = iter(lines)

        def read(_prompt: str = "") -> str:
            line = next(remaining, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)

    return type_lines


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Standard input that holds a text."""
    return lambda text: monkeypatch.setattr(sys, "stdin", io.StringIO(text))
