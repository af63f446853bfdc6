"""Puts the parts together: engine, recorder, routes, page, server. Owns their order of starting and ending."""

import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import gradio as gr
import uvicorn
from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles

from minivllm_plugin.errors import ConfigError
from minivllm_ui.conversation import Conversations
from minivllm_ui.engine_host import FCFS, EngineHost
from minivllm_ui.guard import Guard
from minivllm_ui.guests import MOST_GUESTS, Guests
from minivllm_ui.loops import in_event_loop
from minivllm_ui.observer import EngineObserver
from minivllm_ui.page import STATIC, build_page
from minivllm_ui.recorder import Recorder
from minivllm_ui.routes import engine_routes
from minivllm_ui.state_door import StateDoor

__all__ = ["DEFAULT_NUM_BLOCKS", "PageServer", "PageSettings"]

DEFAULT_NUM_BLOCKS = 512  # few enough to see each
SMALL_NUM_BLOCKS = 48
QUEUE_NAP = 0.02  # seconds between Gradio's looks into its queue; its own 1 ms costs 6 % of an idle core
HEAD = '<link rel="stylesheet" href="engine/static/panel.css"><link rel="stylesheet" href="engine/static/page.css">' + (
    '<script type="module" src="engine/static/page.js"></script>'
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageSettings:
    """What ``minivllm ui`` was asked for.

    Attributes:
        options: of the engine; ``num_blocks`` defaults to 512, so that the pool can be seen as a whole.
        auth: user and password.
        port: 0 takes a free one.
    """

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    policy: str = FCFS
    host: str = "127.0.0.1"
    port: int = 7860
    auth: tuple[str, str] | None = None


class PageServer:
    """The engine and its page, bound to a port.

    Args:
        settings: all of it.

    Attributes:
        url: where a browser on this machine finds it.

    Raises:
        ConfigError: the port is taken, or a setting is impossible.
        ModelError: the model cannot be had.
    """

    def __init__(self, settings: PageSettings) -> None:
        self._settings = settings
        self._socket = _bind(settings.host, settings.port)
        self.url = _url(self._socket)
        try:
            options = {"num_blocks": DEFAULT_NUM_BLOCKS, **settings.options}
            observer = EngineObserver()
            self.engine = EngineHost(settings.model, options, settings.policy, observer)
        except BaseException:
            self._socket.close()
            raise
        self.guests: Guests | None = None
        self.recorder = Recorder(observer, self._about)
        self.conversations = Conversations()
        self.guests = guests = Guests(self.engine, self.recorder)
        app = in_event_loop(lambda: self._build(guests))
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2)
        self._server = _Server(config, self._end_answers)
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Serve until Ctrl-C, then close the engine."""
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._end()

    def start(self) -> None:
        """Serve on a thread of its own, ``minivllm-ui-server``, until :meth:`close`."""
        self._thread = threading.Thread(target=self.run, name="minivllm-ui-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop what :meth:`start` began. Returns when it has ended."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join()

    def _end_answers(self) -> None:
        """Streams that go on would hold the server up. Event loop."""
        if self.guests is not None:
            self.guests.set(0)
        self.conversations.stop_all()

    def _end(self) -> None:
        self._socket.close()
        self.recorder.close()
        self.engine.close()

    def _about(self) -> dict[str, Any]:
        engine = self.engine
        return {
            "model": engine.model,
            "policy": engine.policy,
            "policies": engine.policies,
            "guests": self.guests.count if self.guests is not None else 0,
            "most_guests": MOST_GUESTS,
            "normal_blocks": engine.normal_num_blocks,
            "small_blocks": min(SMALL_NUM_BLOCKS, max(8, engine.normal_num_blocks // 2)),
            "max_model_len": engine.max_model_len,
        } | ({"status": "restarting"} if engine.is_restarting else {})

    def _build(self, guests: Guests) -> Any:
        page = build_page(self.engine, self.recorder, self.conversations)
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        app.include_router(engine_routes(self.engine, self.recorder, guests))
        app.mount("/engine/static", StaticFiles(directory=STATIC))
        gr.mount_gradio_app(
            app,
            page,
            path="/",
            theme=_theme(),
            head=HEAD,
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            ssr_mode=False,
            mcp_server=False,
            show_error=True,
        )
        queue: Any = page._queue
        queue.sleep_when_free = QUEUE_NAP
        is_local = self._settings.host in ("127.0.0.1", "localhost", "::1")
        return Guard(StateDoor(app, self.recorder), self._settings.auth, local_only=is_local)


class _Server(uvicorn.Server):
    """Says that it is about to stop, while it still serves."""

    def __init__(self, config: uvicorn.Config, on_shutdown: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_shutdown = on_shutdown

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_shutdown()
        await super().shutdown(sockets)


def _theme() -> gr.themes.Base:
    # The bundled 600-weight files have no Latin letters, so only the complete weights are named.
    return gr.themes.Default(
        primary_hue="indigo",
        neutral_hue="slate",
        font=[gr.themes.LocalFont("IBM Plex Sans", weights=(400, 700)), "system-ui", "sans-serif"],
        font_mono=[gr.themes.LocalFont("IBM Plex Mono", weights=(400, 700)), "ui-monospace", "monospace"],
    )


def _url(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def _bind(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    except OSError as error:
        raise ConfigError(f"{host!r} is no address of this machine: {error}") from error
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen(128)  # who comes before the server serves waits, and is not refused
    except OSError as error:
        bound.close()
        raise ConfigError(f"the page cannot listen on {host} port {port}: {error}; --port 0 takes a free one") from error
    return bound
