"""The real LiteLLM proxy, started as a process of its own by ``minivllm serve``, and the official clients in front of it."""

import importlib.util
import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from waiting import wait_until

SERVER_PACKAGES = (
    "apscheduler", "backoff", "cryptography", "email_validator", "expression", "fastapi_sso", "jwt", "litellm", "mcp", "nacl",
    "orjson", "prometheus_client", "redis", "semver", "soundfile", "uvicorn", "websockets",
)  # fmt: skip
CLIENT_PACKAGES = ("anthropic", "openai")
SCRIPTED = Path(__file__).with_name("scripted_server.py")
SUPPORT = Path(__file__).parents[1] / "support"  # of the scripted server
KEY = "sk-a-key-of-these-tests-only"
OURS = ("COV_", "PYTEST_", "MINIVLLM_", "LITELLM_")  # settings of the run that these tests are in


@dataclass
class Served:
    """One running server.

    Attributes:
        lines: what it has printed so far.
    """

    process: "subprocess.Popen[str]"
    url: str = ""
    key: str | None = None
    lines: list[str] = field(default_factory=list)

    def request(
        self, path: str, body: Any = None, *, key: str | None = None, headers: dict[str, str] | None = None, data: Any = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, decoded JSON (or text) and headers; ``data`` is sent as it is, an iterator in chunks of unknown number."""
        content = data if data is not None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data=content, headers={"Content-Type": "application/json", **(headers or {})}
        )
        if (key or self.key) is not None:
            request.add_header("Authorization", f"Bearer {key or self.key}")
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, _decoded(response.read()), _lower(response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, _decoded(error.read()), _lower(error.headers)

    def num_live(self, model: str = "scripted") -> int:
        """Requests that the engine has in hand, by its health; what it says may be some 50 ms old."""
        engine = self.request("/health")[1]["engines"][model]
        return int(engine["num_running"] + engine["num_waiting"])

    def becomes_idle(self, model: str = "scripted") -> None:
        wait_until(lambda: self.num_live(model) == 0)


def _decoded(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode()


def _lower(headers: Any) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def need_packages() -> None:
    missing = [name for name in (*SERVER_PACKAGES, *CLIENT_PACKAGES) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"the proxy's server side or its clients are not installed here (extra serve): {', '.join(missing)}")


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., Served]]:
    """Starts servers and, at the end of the session, stops those that still run."""
    need_packages()
    started: list[Served] = []

    def start(*command: str | Path, key: str | None = None, **settings: str) -> Served:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
        environment |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        environment |= {"PYTHONPATH": str(SUPPORT), **settings}
        if key is not None:
            environment["LITELLM_MASTER_KEY"] = key
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        served = Served(process, key=key)
        started.append(served)
        threading.Thread(target=_read, args=(served,), name="proxy-output", daemon=True).start()
        wait_until(lambda: _has_url(served) or process.poll() is not None, seconds=120)
        if not served.url:
            raise AssertionError("the server did not start:\n" + "".join(served.lines))
        return served

    yield start
    for served in started:
        stop(served)


def stop(served: Served) -> int:
    """End it as a service manager does; its exit status."""
    if served.process.poll() is None:
        served.process.terminate()
    try:
        return served.process.wait(30)
    except subprocess.TimeoutExpired:
        served.process.kill()
        raise AssertionError("the server did not end within 30 s:\n" + "".join(served.lines)) from None


def _read(served: Served) -> None:
    assert served.process.stdout is not None
    with served.process.stdout as output:
        for line in output:
            served.lines.append(line)


def _has_url(served: Served) -> bool:
    served.url = next((line.split()[-1] for line in served.lines if line.startswith("minivllm serve: http")), "")
    return bool(served.url)


@pytest.fixture(scope="session")
def server(start: Callable[..., Served]) -> Served:
    """Scripted engines behind a key, with small limits."""
    return start(
        SCRIPTED,
        "scripted",
        "narrow",
        "gpt-4o=scripted",
        "--port",
        "0",
        "--max-request-mb",
        "0.25",
        "--max-parallel",
        "6",
        key=KEY,
    )


def openai_at(server: Served, *, strict: bool = True) -> Any:
    """OpenAI's client. ``strict``: every response is checked against OpenAI's types, field by field."""
    import openai

    key = server.key or "none"
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60, _strict_response_validation=strict)


@pytest.fixture
def openai_client(server: Served) -> Iterator[Any]:
    with openai_at(server) as client:
        yield client
    server.becomes_idle()


@pytest.fixture
def lax_openai_client(server: Served) -> Iterator[Any]:
    """As people make it. For what its own strict mode refuses of anybody (embeddings in base64, streams of completions), and for
    the Responses API, where LiteLLM leaves out fields that the strict mode wants."""
    with openai_at(server, strict=False) as client:
        yield client
    server.becomes_idle()


@pytest.fixture
def anthropic_client(server: Served) -> Iterator[Any]:
    import anthropic

    with anthropic.Anthropic(
        base_url=server.url, api_key=KEY, max_retries=0, timeout=60, _strict_response_validation=True
    ) as client:
        yield client
    server.becomes_idle()


@pytest.fixture
def lax_anthropic_client(server: Served) -> Iterator[Any]:
    """As people make it: LiteLLM sends thinking without the signature that only Anthropic can give."""
    import anthropic

    with anthropic.Anthropic(base_url=server.url, api_key=KEY, max_retries=0, timeout=60) as client:
        yield client
    server.becomes_idle()
