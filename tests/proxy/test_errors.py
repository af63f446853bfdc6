"""Every refusal reaches the client under the right status and class, before and in streams. (Kind: G10.)"""

import threading
from typing import Any

import pytest
from waiting import wait_until

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ENDLESS: list[Any] = [{"role": "user", "content": "Go on for ever"}]
CALLS = ["chat", "stream", "completions", "responses"]


def _ask(client: Any, call: str, text: str = "x", **options: Any) -> Any:
    if call == "completions":
        return client.completions.create(model="scripted", prompt=text, **options)
    if call == "responses":
        extra = {"max_output_tokens": options.pop("max_tokens")} if "max_tokens" in options else {}
        return client.responses.create(model="scripted", input=text, **extra, **options)
    made = client.chat.completions.create(
        model="scripted", messages=[{"role": "user", "content": text}], stream=call == "stream", **options
    )
    return list(made) if call == "stream" else made


@pytest.mark.parametrize("call", CALLS)
def test_too_long_is_400(openai_client: Any, call: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=r"32768|context"):
        _ask(openai_client, call, "word " * 8000)
    with pytest.raises(openai.BadRequestError, match=r"32768|context"):
        _ask(openai_client, call, max_tokens=40_000)


@pytest.mark.parametrize("call", ["chat", "stream", "completions"])
@pytest.mark.parametrize(
    ("options", "named"),
    [({"temperature": -1}, "temperature"), ({"extra_body": {"tempreature": 1}}, "tempreature"), ({"stop": [""]}, "stop")],
    ids=["value", "misspelt", "stop"],
)
def test_a_bad_parameter_is_400_and_named(openai_client: Any, call: str, options: dict[str, Any], named: str) -> None:
    import openai

    with pytest.raises(openai.BadRequestError, match=named):
        _ask(openai_client, call, **options)


def test_a_bad_tool_is_400(openai_client: Any) -> None:
    import openai

    with pytest.raises(openai.BadRequestError):
        openai_client.chat.completions.create(model="scripted", messages=QUESTION, tools=[{"type": "function"}])


def test_no_such_model(openai_client: Any, anthropic_client: Any) -> None:
    import anthropic
    import openai

    with pytest.raises((openai.NotFoundError, openai.BadRequestError), match="nobody"):
        openai_client.chat.completions.create(model="nobody", messages=QUESTION)
    with pytest.raises((anthropic.NotFoundError, anthropic.BadRequestError), match="nobody"):
        anthropic_client.messages.create(model="nobody", max_tokens=5, messages=QUESTION)


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_is_408_and_ends_the_request(openai_client: Any, server: Any, stream: bool) -> None:
    import openai

    with pytest.raises(openai.APIError) as caught:
        made = openai_client.chat.completions.create(
            model="scripted", messages=ENDLESS, stream=stream, extra_body={"timeout": 0.3}
        )
        list(made)
    if not stream:
        assert caught.value.status_code == 408
    assert "timeout" in str(caught.value).lower() or "timed out" in str(caught.value).lower()
    server.becomes_idle()


def test_a_full_queue_is_429(openai_client: Any, server: Any) -> None:
    import openai

    with openai_client.chat.completions.create(model="narrow", messages=ENDLESS, stream=True) as stream:
        next(iter(stream))
        for streamed in (False, True):
            with pytest.raises(openai.RateLimitError):
                openai_client.chat.completions.create(model="narrow", messages=QUESTION, stream=streamed)
        with pytest.raises(openai.RateLimitError):
            openai_client.completions.create(model="narrow", prompt="x")
    server.becomes_idle("narrow")


def test_a_dead_engine_is_500_once_and_then_another_serves(openai_client: Any, server: Any) -> None:
    import openai

    with pytest.raises(openai.InternalServerError):
        openai_client.chat.completions.create(model="narrow", messages=[{"role": "user", "content": "Fail"}])
    status, health, _ = server.request("/health")
    assert (status, health["status"], health["engines"]["narrow"]) == (503, "unhealthy", {"state": "stopped"})
    assert health["engines"]["scripted"]["state"] == "ready"
    again = openai_client.chat.completions.create(model="narrow", messages=QUESTION)
    assert again.choices[0].finish_reason == "stop"
    assert server.request("/health")[0] == 200


def test_anthropic_s_errors_have_its_form(anthropic_client: Any, server: Any) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError):
        anthropic_client.messages.create(model="scripted", max_tokens=5, messages=[{"role": "user", "content": "word " * 8000}])
    status, body, _ = server.request("/v1/messages", data=b"{" + b" " * 300_000)
    assert (status, body["type"], body["error"]["type"]) == (413, "error", "request_too_large")


def test_more_at_once_than_allowed_is_429(openai_client: Any, server: Any) -> None:
    done = threading.Event()
    answers: list[int] = []

    def ask() -> None:
        body = {"model": "scripted", "messages": ENDLESS, "timeout": 3}
        answers.append(server.request("/v1/chat/completions", body)[0])

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: server.request("/health")[1]["num_active_requests"] == 6)
    for path in ("/v1/chat/completions", "/embeddings", "/v1/messages"):
        status, body, headers = server.request(path, {"model": "scripted", "input": "x", "messages": QUESTION, "max_tokens": 3})
        assert (status, headers["retry-after"]) == (429, "1")
        assert body["error"]["type"] == "rate_limit_error"
    assert server.request("/v1/models")[0] == 200
    for thread in threads:
        thread.join(60)
    done.set()
    assert answers == [408] * 6
    wait_until(lambda: server.request("/health")[1]["num_active_requests"] == 0)  # counted until its answer has left
    assert openai_client.chat.completions.create(model="scripted", messages=QUESTION).choices[0].finish_reason == "stop"
