"""A client that hangs up takes its request with it, on every route, streaming or not. (Kind: G08.)"""

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest
from waiting import wait_until

ENDLESS: list[Any] = [{"role": "user", "content": "Go on for ever"}]
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": ENDLESS},
    "/v1/completions": {"prompt": "Go on for ever", "max_tokens": 20_000},
    "/v1/responses": {"input": "Go on for ever"},
    "/v1/messages": {"messages": ENDLESS, "max_tokens": 20_000},
}


def _open(server: Any, path: str, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=60)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {server.key}"}
    connection.request("POST", path, json.dumps({"model": "scripted", **body}), headers)
    return connection


@pytest.mark.parametrize("path", ROUTES)
def test_hanging_up_in_the_middle_of_a_stream(server: Any, path: str) -> None:
    connection = _open(server, path, {**ROUTES[path], "stream": True})
    response = connection.getresponse()
    assert response.status == 200
    response.read(200)
    wait_until(lambda: server.num_live() == 1)
    response.close()
    connection.close()
    server.becomes_idle()


@pytest.mark.parametrize("path", ROUTES)
def test_hanging_up_while_waiting_for_the_whole_answer(server: Any, path: str) -> None:
    connection = _open(server, path, ROUTES[path])
    wait_until(lambda: server.num_live() == 1)
    connection.close()
    server.becomes_idle()


def test_many_leave_at_once_and_nothing_is_left(server: Any) -> None:
    connections = [_open(server, "/v1/chat/completions", {"messages": ENDLESS, "stream": bool(index % 2)}) for index in range(5)]
    wait_until(lambda: server.num_live() == 5)
    for connection in connections:
        connection.close()
    server.becomes_idle()
    wait_until(lambda: server.request("/health")[1]["num_active_requests"] == 0)  # the server notices a moment later
    assert server.request("/health")[1]["engines"]["scripted"]["num_used_blocks"] == 0


def test_the_client_s_own_ways_to_leave(openai_client: Any, anthropic_client: Any, server: Any) -> None:
    import openai

    with openai_client.chat.completions.create(model="scripted", messages=ENDLESS, stream=True) as stream:
        next(iter(stream))
        wait_until(lambda: server.num_live() == 1)
    server.becomes_idle()
    with anthropic_client.messages.stream(model="scripted", max_tokens=20_000, messages=ENDLESS) as events:
        next(iter(events.text_stream))
        wait_until(lambda: server.num_live() == 1)
    server.becomes_idle()
    with pytest.raises(openai.APITimeoutError):
        openai_client.with_options(timeout=1.0).chat.completions.create(model="scripted", messages=ENDLESS)
    server.becomes_idle()
