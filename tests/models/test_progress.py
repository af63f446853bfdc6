"""A transfer as a person sees it: a bar on a terminal, plain lines elsewhere, silence when switched off."""

import sys

import pytest

from minivllm_plugin.models.progress import TransferProgress, announce


def transfer(*, enabled: bool = True, fail: bool = False) -> None:
    with TransferProgress("pulling tiny", 2_000_000, enabled=enabled) as bar:
        bar.update(1_000_000)
        bar.update(5_000_000)  # a fetcher may need more than the file's size
        if fail:
            raise ConnectionError


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    transfer()
    out, err = capsys.readouterr()
    assert out == ""
    assert "pulling tiny" in err
    assert "2.0/2.0 MB" in err


def test_a_bar_stops_where_it_failed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with pytest.raises(ConnectionError):
        transfer(fail=True)
    assert "pulling tiny" in capsys.readouterr().err


def test_elsewhere_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    transfer()
    first, last = capsys.readouterr().err.splitlines()
    assert first == "minivllm: pulling tiny (2 MB) ..."
    assert last.startswith("minivllm: pulling tiny: done in ")
    with pytest.raises(ConnectionError):
        transfer(fail=True)
    assert "done" not in capsys.readouterr().err


def test_switched_off_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    transfer(enabled=False)
    announce("hello", enabled=False)
    assert capsys.readouterr() == ("", "")
