"""What the server answers: state, control, who may ask; and the programs around it."""

import asyncio
import json
import urllib.error
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from waiting import wait_until

from minivllm_plugin.cli import main
from minivllm_plugin.errors import ConfigError, EngineError
from minivllm_plugin.plugins import discovery
from minivllm_ui.check import ask_over_http, open_url
from minivllm_ui.frames import decode
from minivllm_ui.guard import Guard
from minivllm_ui.state_door import StateDoor
from minivllm_ui.top import picture, watch

Serve = Callable[..., Any]


def _json(url: str, order: object = None) -> Any:
    return json.loads(open_url(url, None, order))


def _status(url: str, *arguments: Any) -> int:
    with pytest.raises(urllib.error.HTTPError) as caught:
        open_url(url, *arguments)
    caught.value.close()
    return caught.value.code


def test_one_chat_over_http_and_nobody_s_words_in_the_state(serve: Serve) -> None:
    served = serve()
    assert ask_over_http(served.url, "hello, my secret is 4711") == "Hello there."
    wait_until(served.is_idle)
    state = open_url(f"{served.url}engine/state?mine=chat-1")
    everything = [state, open_url(f"{served.url}engine/past"), *(open_url(f"{served.url}engine/block/{n}") for n in range(4))]
    assert all(b"4711" not in answer and b"Hello" not in answer for answer in everything)
    frame = decode(state)
    assert frame.header["finished"] == 1
    assert len(frame.left_behind) == frame.header["cached"] > 0


def test_the_state_is_sent_once_a_version(serve: Serve) -> None:
    served = serve()
    wait_until(lambda: served.header()["status"] == "serving")
    header = _json(f"{served.url}engine/state?format=json")
    assert open_url(f"{served.url}engine/state?since={header['version']}") == b""
    assert header["free"] == header["num_blocks"] == 256
    assert {"fcfs", "lpm"} <= set(header["policies"])


def test_control_refuses_what_it_does_not_know(serve: Serve) -> None:
    served = serve()
    url = f"{served.url}engine/control"
    assert _json(url, {"guests": 0})["guests"] == 0
    assert _status(url, None, {"guests": -1}) == 422
    assert _status(url, None, {"pool": 3}) == 422
    assert _status(url, None, {"policy": "nonsense"}) == 400
    assert _status(f"{served.url}engine/block/999") == 404
    assert _json(url, {"num_blocks": 48})["num_blocks"] == 48
    served.until(lambda header: header["num_blocks"] == 48)


def test_auth_is_asked_for_by_the_page_and_by_our_own_routes(serve: Serve) -> None:
    served = serve(auth=("me", "secret"))
    for path in ("", "config", "engine/state", "engine/past", "engine/static/panel.js", "gradio_api/info"):
        assert _status(served.url + path) == 401
        assert _status(served.url + path, ("me", "wrong")) == 401
    assert _status(f"{served.url}engine/control", None, {"guests": 3}) == 401
    assert ask_over_http(served.url, "hello", ("me", "secret")) == "Hello there."
    with pytest.raises(ConfigError, match="--auth USER:PASSWORD"):
        watch(served.url, None, interval=1, once=True)


async def _passed(scope: Any, receive: Any, send: Any) -> None:
    scope["passed"] = True


@pytest.mark.parametrize(
    ("headers", "method", "passes"),
    [
        ({"host": "127.0.0.1:7860"}, "GET", True),
        ({"host": "localhost:7860"}, "GET", True),
        ({"host": "[::1]:7860"}, "GET", True),
        ({"host": "evil.example:7860"}, "GET", False),
        ({}, "GET", False),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, "POST", True),
        ({"host": "localhost:1", "origin": "http://evil.example"}, "POST", False),
        ({"host": "localhost:1", "origin": "null"}, "POST", False),
    ],
)
def test_the_guard_knows_this_machine_and_this_site(headers: dict[str, str], method: str, passes: bool) -> None:

    scope: dict[str, Any] = {
        "type": "http",
        "method": method,
        "path": "/engine/control",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.disconnect"}

    asyncio.run(Guard(_passed, None, local_only=True)(scope, receive, send))
    assert scope.get("passed", False) is passes
    assert passes or sent[0]["status"] == 403


def test_the_present_comes_through_its_own_door_and_all_else_through_the_application() -> None:
    class Pictures:
        def frame(self, since: str, mine: str) -> bytes | None:
            return None if since == "7" else f"{since}|{mine}".encode()

    def ask(query: str, method: str = "GET", path: str = "/engine/state") -> Any:
        scope = {"type": "http", "method": method, "path": path, "query_string": query.encode(), "headers": []}
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        asyncio.run(StateDoor(_passed, Pictures())(scope, _nothing_more, send))  # type: ignore[arg-type]
        return "application" if scope.get("passed") else (sent[0]["status"], sent[1]["body"])

    assert ask("since=3&mine=chat-1") == (200, b"3|chat-1")
    assert ask("") == (200, b"|")
    assert ask("since=7&mine=") == (204, b"")
    for query, method, path in (
        ("at=5", "GET", "/engine/state"),
        ("format=json", "GET", "/engine/state"),
        ("", "POST", "/engine/state"),
        ("", "GET", "/engine/past"),
    ):
        assert ask(query, method, path) == "application"


async def _nothing_more() -> Any:
    return {"type": "http.disconnect"}


def test_a_taken_port_and_an_unknown_policy_are_named(serve: Serve) -> None:
    served = serve()
    port = int(served.url.rstrip("/").rsplit(":", 1)[1])
    from minivllm_ui.app import PageServer, PageSettings

    with pytest.raises(ConfigError, match="--port 0"):
        PageServer(PageSettings(model="scripted", port=port))
    with pytest.raises(ConfigError, match="no policy is called 'nonsense'"):
        PageServer(PageSettings(model="scripted", port=0, policy="nonsense"))


def test_an_installed_policy_can_be_named_and_stays_when_the_pool_changes(
    serve: Serve, model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "acme_ui_policy.py").write_text(
        "from minivllm_plugin.plugins import hookimpl\n@hookimpl\ndef minivllm_order_waiting(waiting):\n    return None\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    points = [*entry_points(group="minivllm"), EntryPoint("acme", "acme_ui_policy", "minivllm")]
    monkeypatch.setattr(discovery, "entry_points", lambda group: points)
    served = serve(policy="acme")
    assert served.header()["policies"].count("acme") == 1
    assert _json(f"{served.url}engine/control", {"num_blocks": 48})["policy"] == "acme"
    assert list(model.options["policies"]) == ["acme"]


def test_a_question_that_does_not_fit_is_told_in_words(serve: Serve) -> None:
    served = serve(options={"num_blocks": 1})
    with pytest.raises(
        EngineError, match=r"gave no answer; it says: the prompt has \d+ tokens; the context window is 16 .* pool$"
    ):
        ask_over_http(served.url, "hello")


def test_top_draws_what_the_page_shows(serve: Serve, model: Any) -> None:
    served = serve()
    assert served.server.recorder.frame() is not None
    ask_over_http(served.url, "hello")
    wait_until(served.is_idle)
    console = Console(width=100, record=True, file=__import__("io").StringIO())
    watch(served.url, None, interval=1, once=True, console=console)
    text = console.export_text()
    assert "minivllm · scripted   serving" in text
    assert text.count("▪") - 1 == served.header()["cached"]  # one in the legend
    assert "Chat 1 is done after" in text
    console.print(picture(served.frame(), 100))
    with pytest.raises(ConfigError, match="no address"):
        watch("ftp://x", None, interval=1, once=True)
    with pytest.raises(EngineError, match="nobody answers"):
        watch("http://127.0.0.1:9/", None, interval=1, once=True)


def test_the_command_line_answers_one_question_and_exits(model: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model.answers = {"Say hello": "Good day."}
    with pytest.raises(SystemExit) as caught:
        main(["ui", "scripted", "--check", "--port", "0", "--auth", "me:secret", "--num-blocks", "64", "--policy", "lpm"])
    assert caught.value.code == 0
    assert "answered: Good day." in capsys.readouterr().out
    assert model.options["num_blocks"] == 64
    with pytest.raises(SystemExit) as caught:
        main(["ui", "scripted", "--auth", "nobody"])
    assert caught.value.code == 1
    assert "USER:PASSWORD" in capsys.readouterr().err


def test_guests_come_share_and_leave(serve: Serve) -> None:
    served = serve()
    open_url(f"{served.url}engine/control", None, {"guests": 4})
    served.until(lambda header: header["guests"] == 4 and header["running"] >= 3 and header["shared"] > 0)
    assert all(one["label"].startswith("Guest ") for one in served.header()["sequences"])
    open_url(f"{served.url}engine/control", None, {"guests": 0})
    wait_until(served.is_idle)
    assert served.header()["guests"] == 0
