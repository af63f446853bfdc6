"""What stands between the socket and LiteLLM's proxy: which routes are served, how large and how many requests may be, health.

Plain ASGI; knows neither LiteLLM nor the engine. Runs on the server's event loop, which alone touches its counters. LiteLLM's
own size limit is part of its paid edition, its ``/health`` generates text, and its several hundred other routes (administration,
pass-through to hosted providers with the keys in this process's environment) have no place in front of a local model.
"""

import asyncio
import json
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

__all__ = ["Guard"]

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

GENERATING = frozenset(
    f"{prefix}{route}"
    for prefix in ("", "/v1")
    for route in ("/chat/completions", "/completions", "/responses", "/embeddings", "/messages")
) - {"/messages"}
ASKING = frozenset({"/v1/messages/count_tokens", "/utils/token_counter"})
OPEN = frozenset({"/health/liveliness", "/health/liveness", "/health/readiness"})  # without a key; they say only yes or no
LOOKING = OPEN | {"/models", "/v1/models", "/model/info", "/v1/model/info", "/metrics"}
LOOKING_UNDER = ("/models/", "/v1/models/")
HEALTH = "/health"
DRAINED_BYTES = 64 * 2**20  # of a refused body: read and thrown away, so that the client gets to see the answer
DRAINED_SECONDS = 10.0
NOT_SERVED = (
    "is not served here: `minivllm serve` opens the model API only (chat, completions, responses, messages, embeddings, models, "
    "health, metrics); run LiteLLM's own proxy for the rest"
)
RETRY_AFTER = "1"  # seconds

# status -> (OpenAI's type and code, Anthropic's type)
KINDS = {
    401: ("authentication_error", "invalid_api_key", "authentication_error"),
    404: ("invalid_request_error", "not_found", "not_found_error"),
    413: ("invalid_request_error", "request_too_large", "request_too_large"),
    415: ("invalid_request_error", "unsupported_media_type", "invalid_request_error"),
    429: ("rate_limit_error", "too_many_requests", "rate_limit_error"),
}


class Guard:
    """An ASGI app around another one.

    Args:
        app: LiteLLM's proxy.
        max_parallel: requests on generating routes at a time; one more is answered 429.
        max_request_bytes: of a body; more is answered 413, before anything of it is parsed.
        health: what ``GET /health`` says: whether all is well, and the details, which only holders of the key see.
        master_key: what requests must carry, as a bearer token or ``x-api-key``; None lets everybody in. Asked for here, not by
            LiteLLM, which answers a wrong key with 400 when it has no database.
        is_ending: whether the server has been told to end, and what is cancelled is cancelled for that.

    Attributes:
        num_active: generating requests now.
    """

    def __init__(
        self,
        app: App,
        *,
        max_parallel: int,
        max_request_bytes: int,
        health: Callable[[], tuple[bool, dict[str, Any]]],
        master_key: str | None,
        is_ending: Callable[[], bool] = lambda: False,
    ) -> None:
        self._app = app
        self._max_parallel = max_parallel
        self._max_request_bytes = max_request_bytes
        self._health = health
        self._master_key = master_key
        self._is_ending = is_ending
        self.num_active = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            try:
                await self._http(scope, receive, send)
            except asyncio.CancelledError:
                if not self._is_ending():  # the server cuts the connection; it need not log how deep in LiteLLM that was
                    raise
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "there are no websockets here"})

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"].rstrip("/") or "/", scope["method"]
        if path == HEALTH and method in ("GET", "HEAD"):
            await self._answer_health(scope, send)
        elif not _is_served(path, method):
            await _refuse(scope, send, 404, f"{method} {path} {NOT_SERVED}")
        elif method != "OPTIONS" and path not in OPEN and not self._may_enter(scope):
            await _refuse(scope, send, 401, "the key is missing or wrong; send `Authorization: Bearer <master key>`")
        elif path == "/metrics":
            # prometheus_client writes the colon of our names as an underscore for clients that prefer OpenMetrics.
            headers = [(name, value) for name, value in scope["headers"] if name != b"accept"]
            await self._app({**scope, "headers": headers, "path": "/metrics/", "raw_path": b"/metrics/"}, receive, send)
        elif method != "POST":
            await self._app(scope, receive, send)
        else:
            await self._post(path, scope, receive, send)

    async def _post(self, path: str, scope: Scope, receive: Receive, send: Send) -> None:
        if (_header(scope, b"content-encoding") or b"identity") != b"identity":
            await _drain(receive)
            await _refuse(scope, send, 415, "compressed request bodies are not accepted; send the JSON as it is")
            return
        if path in GENERATING and self.num_active >= self._max_parallel:
            await _drain(receive)
            what = f"{self._max_parallel} requests are in progress, and no more are taken; try again later"
            await _refuse(scope, send, 429, what, (b"retry-after", RETRY_AFTER.encode()))
            return
        self.num_active += path in GENERATING
        try:
            checked = await self._checked_body(scope, receive)
            if checked is None:
                await _drain(receive)
                what = f"the request's body is larger than {self._max_request_bytes} bytes, the limit of this server"
                await _refuse(scope, send, 413, what)
                return
            await self._app(scope, checked, send)
        finally:
            self.num_active -= path in GENERATING

    async def _checked_body(self, scope: Scope, receive: Receive) -> Receive | None:
        """A body that is small enough, to be received; None if it is too large. One of unknown length is read here."""
        length = _header(scope, b"content-length")
        if length is not None:  # the server reads no more than was announced
            return receive if length.isdigit() and int(length) <= self._max_request_bytes else None
        parts: list[bytes] = []
        while True:
            message = await receive()
            parts.append(message.get("body", b""))
            if sum(map(len, parts)) > self._max_request_bytes:
                return None
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return _replay([{"type": "http.request", "body": b"".join(parts), "more_body": False}], receive)

    async def _answer_health(self, scope: Scope, send: Send) -> None:
        is_well, details = self._health()
        answer: dict[str, Any] = {"status": "healthy" if is_well else "unhealthy"}
        if self._may_enter(scope):
            answer |= {"num_active_requests": self.num_active, **details}
        await _send_json(send, 200 if is_well else 503, answer)

    def _may_enter(self, scope: Scope) -> bool:
        return self._master_key is None or _knows(scope, self._master_key)


def _is_served(path: str, method: str) -> bool:
    if method == "OPTIONS":  # what browsers ask before they send a request from another page
        return any(_is_served(path, other) for other in ("GET", "POST"))
    if method == "POST":
        return path in GENERATING or path in ASKING
    return method in ("GET", "HEAD") and (path in LOOKING or path.startswith(LOOKING_UNDER))


def _knows(scope: Scope, key: str) -> bool:
    given = (_header(scope, b"authorization") or b"").removeprefix(b"Bearer ").strip() or _header(scope, b"x-api-key") or b""
    return secrets.compare_digest(given, key.encode())


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next(
        (value.strip().lower() if name.startswith(b"content-") else value for key, value in scope["headers"] if key == name), None
    )


def _replay(messages: list[Message], receive: Receive) -> Receive:
    async def replayed() -> Message:
        return messages.pop(0) if messages else await receive()

    return replayed


async def _drain(receive: Receive) -> None:
    """Read what the client is still sending: a socket that is closed on unread data loses the answer on its way."""
    left = DRAINED_BYTES
    try:
        async with asyncio.timeout(DRAINED_SECONDS):
            while left > 0:
                message = await receive()
                left -= len(message.get("body", b""))
                if message["type"] == "http.disconnect" or not message.get("more_body", False):
                    return
    except TimeoutError:
        return


async def _refuse(scope: Scope, send: Send, status: int, what: str, *headers: tuple[bytes, bytes]) -> None:
    """An error in the form that the clients of this route read."""
    kind, code, of_anthropic = KINDS[status]
    body: dict[str, Any] = {"error": {"message": what, "type": kind, "param": None, "code": code}}
    if scope["path"].startswith("/v1/messages"):
        body = {"type": "error", "error": {"type": of_anthropic, "message": what}}
    await _send_json(send, status, body, *headers)


async def _send_json(send: Send, status: int, body: dict[str, Any], *headers: tuple[bytes, bytes]) -> None:
    content = json.dumps(body).encode()
    start = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode()), *headers]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": content})
