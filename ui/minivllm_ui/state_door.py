"""The one route that every open page asks five times a second, answered in front of everything else. Pure ASGI.

Routing, validation and Gradio's middleware take longer than the picture itself; here they are left out. Only the present
(``GET /engine/state``) is answered; the past, JSON and all other routes go on to the application. Stands behind the guard; event
loop thread.
"""

from urllib.parse import parse_qs

from starlette.types import ASGIApp, Receive, Scope, Send

from minivllm_ui.recorder import Recorder

__all__ = ["StateDoor"]

PATH = "/engine/state"
ANSWERED = {"since", "mine"}  # what a question about the present may say
PICTURE = (b"content-type", b"application/octet-stream")
NO_STORE = (b"cache-control", b"no-store")


class StateDoor:
    """Answers for the present out of ``recorder``, and passes the rest on to ``app``."""

    def __init__(self, app: ASGIApp, recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "GET":
            await self._app(scope, receive, send)
            return
        query = parse_qs(scope["query_string"].decode("latin-1"))
        if not query.keys() <= ANSWERED:
            await self._app(scope, receive, send)
            return
        frame = self._recorder.frame(*(query.get(name, [""])[-1] for name in ("since", "mine")))
        headers = [NO_STORE] if frame is None else [PICTURE, NO_STORE, (b"content-length", b"%d" % len(frame))]
        await send({"type": "http.response.start", "status": 204 if frame is None else 200, "headers": headers})
        await send({"type": "http.response.body", "body": frame or b""})
