"""One chat over HTTP, as a browser would hold it: what ``minivllm ui --check`` and ``scripts/demo --ui --check`` do. Any thread.

Speaks Gradio's own wire: the page's configuration names the event behind the message box, ``queue/join`` sends a message and
``queue/data`` streams what becomes of it.
"""

import base64
import json
import urllib.request
import uuid
from typing import Any

from minivllm_plugin.errors import EngineError

__all__ = ["ask_over_http", "open_url"]

PATIENCE = 120.0  # seconds for one answer
OPERATIONS = ("replace", "append", "add", "delete")

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the page is on this machine, or named on purpose


def ask_over_http(url: str, question: str, auth: tuple[str, str] | None = None) -> str:
    """The answer's text, as the page shows it.

    Args:
        url: of the page, ending in a slash.

    Raises:
        EngineError: the page did not answer.
    """
    config = json.loads(open_url(f"{url}config", auth))
    box = next(one["id"] for one in config["components"] if one["props"].get("elem_id") == "message")
    event = next(one for one in config["dependencies"] if [box, "submit"] in [list(target) for target in one["targets"]])
    values = {one["id"]: one["props"].get("value") for one in config["components"]}
    data = [question if number == box else values[number] for number in event["inputs"]]
    session = uuid.uuid4().hex[:11]
    order = {"data": data, "event_data": None, "fn_index": event["id"], "trigger_id": box, "session_hash": session}
    open_url(f"{url}gradio_api/queue/join", auth, order)
    return _read(f"{url}gradio_api/queue/data?session_hash={session}", auth, url)


def open_url(url: str, auth: tuple[str, str] | None = None, order: object = None) -> bytes:
    """GET, or POST of ``order`` as JSON."""
    with _DIRECT.open(_request(url, auth, order), timeout=PATIENCE) as reply:
        return bytes(reply.read())


def _request(url: str, auth: tuple[str, str] | None, order: object = None) -> urllib.request.Request:
    body = None if order is None else json.dumps(order).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"} if body else {})
    if auth is not None:
        request.add_header("Authorization", "Basic " + base64.b64encode(":".join(auth).encode()).decode())
    return request


def _read(url: str, auth: tuple[str, str] | None, page: str) -> str:
    """Follow the stream of an event to its end, and put its differences together."""
    messages: list[Any] = []
    with _DIRECT.open(_request(url, auth), timeout=PATIENCE) as stream:
        for line in stream:
            if not line.startswith(b"data:"):
                continue
            message = json.loads(line[5:])
            if message["msg"] == "process_generating":
                shown = message["output"]["data"][0]
                messages = shown if not _is_difference(shown) else _patched(messages, shown)
            elif message["msg"] == "process_completed":
                if not message["success"]:
                    raise EngineError(f"the page at {page} failed: {message['output'].get('error')}")
                break
    said = [one for one in messages if one["role"] == "assistant"]
    answers = [one for one in said if not (one.get("metadata") or {}).get("title")]
    if not answers:
        raise EngineError(f"the page at {page} gave no answer; it says: {' '.join(map(_text, said)) or 'nothing'}")
    return _text(answers[-1])


def _text(message: Any) -> str:
    return "".join(part["text"] for part in message["content"])


def _is_difference(shown: Any) -> bool:
    return isinstance(shown, list) and all(isinstance(one, list) and one and one[0] in OPERATIONS for one in shown)


def _patched(value: Any, differences: list[Any]) -> Any:
    """Gradio's streaming differences: ``[operation, path, value]``."""
    for operation, path, new in differences:
        if not path:
            value = value + new if operation == "append" else new
            continue
        parent = value
        for step in path[:-1]:
            parent = parent[step]
        last = path[-1]
        if operation == "append":
            parent[last] += new
        elif operation == "delete":
            del parent[last]
        elif operation == "add" and isinstance(parent, list):
            parent.insert(int(last), new)
        else:
            parent[last] = new
    return value
