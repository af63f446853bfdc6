"""``minivllm chat`` over a scripted engine: turns, commands, interrupts, pipes."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from minivllm_plugin.cli import options as cli_options
from minivllm_plugin.errors import EngineDeadError, InvalidRequestError

Run = Callable[..., tuple[int, str, str]]


def test_chat_remembers_the_conversation(run: Run, llm: Any, typed: Any) -> None:
    typed("one", "two", "/exit", "never read")
    code, out, err = run("chat", "m", "--system", "s")
    assert (code, out) == (0, "Hello\nHello\n")
    assert [message["content"] for message in llm.asked[1]] == ["s", "one", "Hello", "two"]
    assert "[2 tokens," in err
    assert "1 of" in err
    assert llm.closed == 1


def test_chat_commands(run: Run, llm: Any, typed: Any) -> None:
    typed("one", "/clear", "two", "/system new  rules", "three", "/system", "four", "/what", "/help", "", "  ")
    code, _, err = run("chat", "m", "--system", "s")
    assert code == 0
    contents = [[message["content"] for message in messages] for messages in llm.asked]
    assert contents == [["s", "one"], ["s", "two"], ["new  rules", "three"], ["four"]]
    assert "unknown command '/what'" in err


def test_chat_ctrl_c_stops_the_answer_not_the_program(run: Run, llm: Any, typed: Any) -> None:
    typed("one", KeyboardInterrupt, "two", EOFError)
    llm.interrupt_at = 1
    code, out, err = run("chat", "m")
    assert code == 0
    assert out == "Hel\n\nHello\n\n"
    assert "[stopped, 1 tokens" in err
    assert "Ctrl-D leaves" in err
    assert [message["content"] for message in llm.asked[1]] == ["one", "Hel", "two"]


def test_chat_goes_on_after_a_refused_turn(run: Run, llm: Any, monkeypatch: pytest.MonkeyPatch, typed: Any) -> None:
    llm.refusals = [InvalidRequestError("too long")]
    typed("one", "two")
    code, _, err = run("chat", "m")
    assert code == 0
    assert "too long. /clear empties the conversation" in err
    assert [message["content"] for message in llm.asked[1]] == ["two"]


def test_chat_ends_when_the_engine_is_dead(run: Run, llm: Any, typed: Any) -> None:
    llm.error = EngineDeadError("the engine thread died")
    typed("one", "two")
    code, _, err = run("chat", "m")
    assert code == 1
    assert "the engine thread died" in err
    assert len(llm.asked) == 1


def test_chat_answers_each_line_of_a_pipe(run: Run, llm: Any, piped: Any) -> None:
    piped("one\n\ntwo")
    code, out, err = run("chat", "m")
    assert (code, out, err) == (0, "Hello\nHello\n", "")
    assert [message["content"] for message in llm.asked[1]] == ["one", "Hello", "two"]


def test_chat_in_a_pipe_fails_loudly(run: Run, llm: Any, piped: Any) -> None:
    llm.error = InvalidRequestError("bad")
    piped("one\ntwo\n")
    assert run("chat", "m")[0] == 1
    llm.error = None
    llm.interrupt_at = 0
    piped("one\n")
    assert run("chat", "m")[0] == 130


def test_loading_is_announced_on_a_terminal(
    llm: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    cli_options.open_llm("m", seed=None)
    assert "loading m" in capsys.readouterr().err
    assert llm.options == {"model": "m"}
