"""LiteLLM's proxy over engines of this process: ``minivllm serve``. One process, one event loop, one engine a model.

Owns the order of things: take the port, load the models, write the configuration, start LiteLLM's ASGI app behind the
:class:`~minivllm_adapters.proxy_guard.Guard`, wait for a signal, let requests end, close the engines. LiteLLM's proxy keeps its
state in module globals and environment variables, so there can be one server in the life of a process. Importing this module
loads neither LiteLLM nor uvicorn.
"""

import importlib
import importlib.util
import os
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from minivllm_adapters.proxy_config import (
    MASTER_KEY_VARIABLE,
    ProxySettings,
    as_yaml,
    is_loopback,
    proxy_config,
    random_key,
    write,
)
from minivllm_adapters.proxy_guard import App, Guard
from minivllm_plugin.errors import ConfigError

if TYPE_CHECKING:
    import uvicorn

__all__ = ["ProxyServer", "ProxySettings", "as_yaml", "has_metrics", "is_loopback", "proxy_config", "random_key"]

INSTALL = 'pip install "minivllm-plugin[serve]"'
BACKLOG = 2048  # connections that wait to be accepted
LITELLM_APP = "litellm.proxy.proxy_server"
# Settings of LiteLLM that a server of local models has no use for; what the user has set stays.
QUIET = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no price list from the network
    "LITELLM_TELEMETRY_DISABLED": "true",
    "LITELLM_LOG": "ERROR",
    "LITELLM_MODE": "PRODUCTION",  # else LiteLLM reads a .env file of the working directory
}


def has_metrics() -> bool:
    """Whether ``/metrics`` can be served: prometheus_client is there."""
    return importlib.util.find_spec("prometheus_client") is not None


class ProxyServer:
    """One server, made and run once.

    Args:
        settings: of the proxy.
        options: engine options, the same for each model.
        folder: keeps the configuration; None takes a temporary folder.
        announce: called with the URL when requests are taken.

    Raises (from :meth:`run`):
        ConfigError: a package is missing, the port is taken, or LiteLLM refuses to start.
        ModelError: a model cannot be loaded.
    """

    def __init__(
        self,
        settings: ProxySettings,
        options: Mapping[str, Any],
        *,
        folder: Path | None = None,
        announce: Callable[[str], None] = print,
    ) -> None:
        self.settings = settings
        self._options = options
        self._folder = folder
        self._announce = announce
        self._server: uvicorn.Server | None = None
        self._keys: dict[str, str] = {}  # public name -> the registry's

    def run(self) -> None:
        """Serve until a signal (SIGINT, SIGTERM) or :meth:`stop`. Afterwards the engines are closed and the port is free."""
        with ExitStack() as stack:
            listener = stack.enter_context(_bound(self.settings.host, self.settings.port))
            litellm_app = _litellm_app(self.settings)
            stack.callback(importlib.import_module("minivllm_plugin.registry").close_all)
            windows = self._load_models(stack)
            folder = self._folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="minivllm-serve-")))
            os.environ["CONFIG_FILE_PATH"] = str(write(proxy_config(self.settings, windows), folder))
            guard = Guard(
                litellm_app,
                max_parallel=self.settings.max_parallel,
                max_request_bytes=int(self.settings.max_request_mb * 2**20),
                health=self._health,
                master_key=self.settings.master_key,
                is_ending=lambda: self._server is not None and self._server.should_exit,
            )
            self._serve(guard, listener)

    def stop(self) -> None:
        """Ask a running server to end, as a signal does. From any thread."""
        if self._server is not None:
            self._server.should_exit = True

    def _load_models(self, stack: ExitStack) -> dict[str, int]:
        """Load every model before the first request can come; returns their windows by public name."""
        from minivllm_plugin import registry

        public_names: dict[str, list[str]] = {}
        for name, model in self.settings.models.items():
            public_names.setdefault(model, []).append(name)
        metrics = self._metrics([names[0] for names in public_names.values()], stack)
        windows: dict[str, int] = {}
        for index, (model, names) in enumerate(public_names.items()):
            plugins = [*self._options.get("plugins", ()), *metrics[index : index + 1]]
            llm = registry.get_llm(model, **{**self._options, "plugins": plugins})
            key = next(key for key, known in registry.loaded().items() if known is llm)
            self._keys.update(dict.fromkeys(names, key))
            windows.update(dict.fromkeys(names, llm.max_model_len))
        return windows

    def _metrics(self, names: Sequence[str], stack: ExitStack) -> list[Any]:
        """A plugin for each engine, and the collector that LiteLLM's page finds them by."""
        if not self.settings.metrics:
            return []
        module = importlib.import_module("minivllm_adapters.proxy_metrics")
        plugins = [module.EngineMetrics(name) for name in names]
        collector = module.AllEngines(plugins)
        collector.register()
        stack.callback(collector.unregister)
        return plugins

    def _health(self) -> tuple[bool, dict[str, Any]]:
        """Whether every engine serves, and what each has to do. Asks no model anything."""
        from minivllm_plugin import registry

        loaded, engines = registry.loaded(), dict[str, dict[str, Any]]()
        for name, key in self._keys.items():
            llm = loaded.get(key)
            if llm is None:
                engines[name] = {"state": "stopped"}  # it died; the next request starts another
                continue
            now = llm.snapshot()
            engines[name] = {
                "state": "ready",
                "num_running": now.num_running,
                "num_waiting": now.num_waiting,
                "num_used_blocks": now.num_used_blocks,
                "num_blocks": now.num_blocks,
            }
        return all(engine["state"] == "ready" for engine in engines.values()), {"engines": engines}

    def _serve(self, app: App, listener: socket.socket) -> None:
        uvicorn = importlib.import_module("uvicorn")
        announce, url = self._announce, _url(listener)

        class Server(uvicorn.Server):  # type: ignore[misc, name-defined]  # imported by name
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                if self.started and not self.should_exit:
                    announce(url)

        settings = uvicorn.Config(
            app,
            lifespan="on",
            ws="none",
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=max(1, round(self.settings.drain_seconds)),
        )
        self._server = Server(settings)
        with _signals_end_quietly():
            self._server.run(sockets=[listener])
        if not self._server.started:
            raise ConfigError("LiteLLM's proxy did not start; its own message stands above")


def _litellm_app(settings: ProxySettings) -> App:
    """LiteLLM's app. Its import reads the environment, so that is set first.

    Raises:
        ConfigError: a package is missing.
    """
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("GRACEFUL_SHUTDOWN_TIMEOUT", f"{settings.drain_seconds:g}")
    os.environ.pop("DATABASE_URL", None)  # perhaps of the user's own program; this proxy has no database
    os.environ.pop("WORKER_CONFIG", None)
    if settings.master_key is None:
        os.environ.pop(MASTER_KEY_VARIABLE, None)
    else:
        os.environ[MASTER_KEY_VARIABLE] = settings.master_key
    try:
        importlib.import_module("uvicorn")
        app: App = importlib.import_module(LITELLM_APP).app
    except ImportError as error:
        raise ConfigError(f"LiteLLM's proxy cannot be imported ({error}); its server side is an extra: {INSTALL}") from error
    return app


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """The port, taken before minutes are spent on loading. Nobody is let in yet: it does not listen.

    Raises:
        ConfigError: it is in use, or the address is none of this machine's.
    """
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, kind)
    except OSError as error:
        raise ConfigError(f"host {host!r} is no address of this machine: {error}") from error
    with listener:
        try:
            if os.name == "posix":
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
        except OSError as error:
            raise ConfigError(f"cannot listen at {host}:{port}: {error}; choose another --port, or 0 for a free one") from error
        yield listener


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """uvicorn sends itself the signal again that ended it, which would kill the process before its engines are closed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _nothing) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _nothing(_number: int, _frame: FrameType | None) -> None:
    """The server has ended already."""
