"""What surrounds the answers: keys, health, metrics, limits, routes, the configuration, and the end of the process."""

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from waiting import wait_until

SCRIPTED = Path(__file__).with_name("scripted_server.py")
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


def test_without_the_key_nothing_is_told(server: Any) -> None:
    asks = {"model": "scripted", "messages": QUESTION, "max_tokens": 5}
    for key in ("sk-wrong", "none"):
        for path in ("/v1/chat/completions", "/v1/messages", "/v1/embeddings", "/v1/responses"):
            assert server.request(path, asks, key=key)[0] == 401
        assert server.request("/v1/models", key=key)[0] == 401
        assert server.request("/metrics", key=key)[0] == 401
        assert server.request("/health", key=key)[:2] == (200, {"status": "healthy"})


def test_the_clients_see_401_as_their_own_error(server: Any) -> None:
    import anthropic
    import openai

    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError),
    ):
        client.chat.completions.create(model="scripted", messages=QUESTION)
    with (
        anthropic.Anthropic(base_url=server.url, api_key="sk-wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.create(model="scripted", max_tokens=5, messages=QUESTION)


def test_health_generates_nothing(server: Any) -> None:
    before = _metric(server, "minivllm:generation_tokens_total")
    for path in ("/health", "/health/liveliness", "/health/readiness", "/v1/models"):
        assert server.request(path)[0] == 200
    engine = server.request("/health")[1]["engines"]["scripted"]
    assert (engine["state"], engine["num_running"], engine["num_blocks"]) == ("ready", 0, 2048)
    assert _metric(server, "minivllm:generation_tokens_total") == before


def test_metrics_of_litellm_and_of_every_engine(server: Any, openai_client: Any) -> None:
    before = _metric(server, "minivllm:generation_tokens_total")
    openai_client.chat.completions.create(model="scripted", messages=QUESTION, max_tokens=7)
    openai_client.chat.completions.create(model="narrow", messages=QUESTION, max_tokens=5)
    for accept in ("text/plain", "application/openmetrics-text; version=1.0.0"):
        status, text, _ = server.request("/metrics", headers={"Accept": accept})
        assert status == 200
        assert 'minivllm:num_requests_running{model_name="scripted"} 0.0' in text
        assert 'minivllm:num_requests_running{model_name="narrow"} 0.0' in text
        assert text.count("# TYPE minivllm:num_requests_running ") == 1
        assert "litellm_" in text
    assert _metric(server, "minivllm:generation_tokens_total") == before + 7


def _metric(server: Any, name: str, model: str = "scripted") -> float:
    text = server.request("/metrics")[1]
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name + "{") and f'"{model}"' in line)


def test_a_body_that_is_too_large_is_413(server: Any) -> None:
    import openai

    big = {"model": "scripted", "messages": [{"role": "user", "content": "x" * 300_000}]}
    status, body, _ = server.request("/v1/chat/completions", big)
    assert (status, body["error"]["code"]) == (413, "request_too_large")

    def pieces() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 10_000

    assert server.request("/v1/chat/completions", data=pieces(), headers={"Transfer-Encoding": "chunked"})[0] == 413
    assert server.request("/v1/chat/completions", data=b"\x1f\x8b", headers={"Content-Encoding": "gzip"})[0] == 415
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as client:
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model="scripted", messages=big["messages"])  # type: ignore[arg-type]
        assert caught.value.status_code == 413


def test_a_small_body_of_unknown_length_is_served(server: Any) -> None:
    data = iter([b'{"model": "scripted", "prompt": "x", ', b'"max_tokens": 3}'])
    status, body, _ = server.request("/v1/completions", data=data, headers={"Transfer-Encoding": "chunked"})
    assert (status, body["choices"][0]["text"]) == (200, "The")


@pytest.mark.parametrize("path", ["/ui", "/key/generate", "/config/update", "/openai/v1/models", "/v1/files", "/health/services"])
def test_the_rest_of_litellm_s_proxy_is_not_served(server: Any, path: str) -> None:
    for body in (None, {}):
        status, answer, _ = server.request(path, body)
        assert (status, answer["error"]["code"]) == (404, "not_found")


def test_it_ends_at_a_signal_with_requests_in_progress(start: Callable[..., Any], tmp_path: Path) -> None:
    command = (SCRIPTED, "scripted", "--port", "0", "--drain-seconds", "1", "--config-dir", tmp_path)
    served = start(*command, DATABASE_URL="postgresql://nobody@localhost/none")
    config = yaml.safe_load((tmp_path / "litellm_proxy.yaml").read_text())
    assert config["model_list"][0]["model_info"]["max_input_tokens"] == 32_768
    assert served.request("/v1/models", key="anything")[0] == 200  # on loopback, without a key
    assert "master key, made" not in "".join(served.lines)
    import urllib.request

    body = b'{"model": "scripted", "stream": true, "messages": [{"role": "user", "content": "Go on for ever"}]}'
    request = urllib.request.Request(served.url + "/v1/chat/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as response:
        response.readline()
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(30) == 0
    assert "Traceback" not in "".join(served.lines)


def test_beyond_loopback_a_key_is_made_and_told_once(start: Callable[..., Any]) -> None:
    served = start(SCRIPTED, "scripted", "--host", "0.0.0.0", "--port", "0")
    wait_until(lambda: any("master key" in line for line in served.lines))
    (line,) = [line for line in served.lines if "master key" in line]
    key = line.split()[-1]
    assert key.startswith("sk-")
    assert len(key) > 40
    served.url = served.url.replace("0.0.0.0", "127.0.0.1")
    assert served.request("/v1/models")[0] == 401
    assert served.request("/v1/models", key=key)[0] == 200
