"""Who may ask: one check in front of everything, the page, Gradio's routes and our own. Pure ASGI, event loop thread.

Gradio's own ``auth=`` guards Gradio's routes only. With HTTP Basic the browser asks once and sends it with every request, and so
do ``minivllm top`` and ``curl -u``.
"""

import base64
import binascii
import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

__all__ = ["Guard"]


class Guard:
    """Refuses what is not allowed to ask.

    Args:
        credentials: user and password, or None for everybody.
        local_only: answer only to names of this machine: else a web page anywhere could have its own name resolve to
            127.0.0.1 and read the engine from the visitor's browser.
    """

    def __init__(self, app: ASGIApp, credentials: tuple[str, str] | None, *, local_only: bool) -> None:
        self._app = app
        self._credentials = None if credentials is None else ":".join(credentials).encode()
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and (refusal := self._refusal(scope)) is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> PlainTextResponse | None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get("host", "")
        if self._local_only and not _is_local(host):
            return PlainTextResponse("this page answers to localhost only; start it with --host to change that", 403)
        if scope.get("method") == "POST" and scope["path"].startswith("/engine/"):
            origin = headers.get("origin")
            if origin is not None and urlsplit(origin).netloc != host:
                return PlainTextResponse("this request comes from another site", 403)
        if self._credentials is not None and not hmac.compare_digest(_given(headers), self._credentials):
            return PlainTextResponse("user and password, please", 401, {"WWW-Authenticate": 'Basic realm="minivllm"'})
        return None


def _given(headers: dict[str, str]) -> bytes:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(token.strip(), validate=True)
    except (binascii.Error, ValueError):
        return b""


def _is_local(host: str) -> bool:
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
