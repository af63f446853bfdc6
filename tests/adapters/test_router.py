"""LiteLLM's Router over the provider: retries, fallbacks, timeouts and when to come back; also plain fallbacks without it."""

import asyncio
import threading
import time
from typing import Any

import litellm
import pytest
from eventually import eventually
from fake_llm import REPLY, FakeLLM

from minivllm_adapters.errors import litellm_error
from minivllm_adapters.handler import MinivllmProvider
from minivllm_plugin.errors import ContextWindowExceededError, EngineDeadError, QueueFullError, RequestRejectedError

MODEL = "minivllm/fake"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "".join(str(step) for step in REPLY)


def _router(**settings: Any) -> litellm.Router:
    models = [
        {"model_name": "first", "litellm_params": {"model": "minivllm/fake"}},
        {"model_name": "second", "litellm_params": {"model": "minivllm/backup"}},
    ]
    return litellm.Router(model_list=models, retry_after=0, disable_cooldowns=True, **settings)


@pytest.fixture(autouse=True)
def _short_backing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """LiteLLM waits about a second before each retry, whatever ``retry_after`` says; how long is its own affair. Its longest
    such wait is under ten seconds, so what a background task sleeps for longer stays as it is."""
    sleep, async_sleep = time.sleep, asyncio.sleep

    def short(seconds: float) -> float:
        return 0.01 if 0.1 < seconds < 10 else seconds

    monkeypatch.setattr(time, "sleep", lambda seconds: sleep(short(seconds)))
    monkeypatch.setattr(asyncio, "sleep", lambda seconds, result=None: async_sleep(short(seconds), result))


@pytest.fixture
def backup(registry: Any) -> FakeLLM:
    registry.llms["backup"] = FakeLLM(["from", " backup"])
    return registry.llms["backup"]  # type: ignore[no-any-return]


def _ask(router: litellm.Router, *, asynchronous: bool, stream: bool) -> str:
    async def ask() -> str:
        answer: Any = await router.acompletion(model="first", messages=MESSAGES, stream=stream)  # type: ignore[arg-type]
        if stream:
            return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
        return str(answer.choices[0].message.content)

    if asynchronous:
        return asyncio.run(ask())
    answer: Any = router.completion(model="first", messages=MESSAGES, stream=stream)  # type: ignore[arg-type]
    return "".join(c.choices[0].delta.content or "" for c in answer) if stream else str(answer.choices[0].message.content)


STYLES = pytest.mark.parametrize(("asynchronous", "stream"), [(False, False), (False, True), (True, False), (True, True)])


@STYLES
def test_the_router_retries_a_full_queue(provider: MinivllmProvider, llm: Any, asynchronous: bool, stream: bool) -> None:
    llm.refusals = [QueueFullError("1024 requests wait"), QueueFullError("1024 requests wait")]
    assert _ask(_router(num_retries=2), asynchronous=asynchronous, stream=stream) == TEXT
    assert len(llm.submissions) == 3


@STYLES
def test_the_router_falls_back(provider: MinivllmProvider, llm: Any, backup: FakeLLM, asynchronous: bool, stream: bool) -> None:
    llm.refusals = [EngineDeadError("out of blocks")]
    router = _router(num_retries=0, fallbacks=[{"first": ["second"]}])
    assert _ask(router, asynchronous=asynchronous, stream=stream) == "from backup"
    assert (len(llm.submissions), len(backup.submissions)) == (1, 1)


@STYLES
def test_the_router_falls_back_to_a_longer_window(
    provider: MinivllmProvider, llm: Any, backup: FakeLLM, asynchronous: bool, stream: bool
) -> None:
    """Only ContextWindowExceededError takes this way, and it is never retried."""
    llm.refusals = [ContextWindowExceededError("9000 tokens, the window is 8192")]
    router = _router(num_retries=2, context_window_fallbacks=[{"first": ["second"]}])
    assert _ask(router, asynchronous=asynchronous, stream=stream) == "from backup"
    assert (len(llm.submissions), len(backup.submissions)) == (1, 1)


@STYLES
def test_the_router_does_not_retry_a_users_fault(provider: MinivllmProvider, llm: Any, asynchronous: bool, stream: bool) -> None:
    llm.refusals = [ContextWindowExceededError("9000 tokens, the window is 8192"), QueueFullError("must not be reached")]
    with pytest.raises(litellm.ContextWindowExceededError):
        _ask(_router(num_retries=2), asynchronous=asynchronous, stream=stream)
    assert len(llm.submissions) == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_router_never_repeats_what_a_stream_has_delivered(provider: MinivllmProvider, llm: Any, asynchronous: bool) -> None:
    llm.steps = ["a", "b", EngineDeadError("out of blocks")]
    texts: list[str] = []

    async def read(router: litellm.Router) -> None:
        async for chunk in await router.acompletion(model="first", messages=MESSAGES, stream=True):  # type: ignore[arg-type, union-attr]
            texts.append(chunk.choices[0].delta.content)  # type: ignore[union-attr, arg-type]

    def read_sync(router: litellm.Router) -> None:
        texts.extend(c.choices[0].delta.content for c in router.completion(model="first", messages=MESSAGES, stream=True))  # type: ignore

    router = _router(num_retries=2)
    with pytest.raises(Exception, match="out of blocks"):
        asyncio.run(read(router)) if asynchronous else read_sync(router)
    assert texts[:2] == ["a", "b"] if asynchronous else True
    assert len(llm.submissions) == 1


@STYLES
def test_a_timeout_of_the_router_is_ours_to_keep(provider: MinivllmProvider, llm: Any, asynchronous: bool, stream: bool) -> None:
    gate = threading.Event()
    llm.steps = ["a", gate]
    with pytest.raises(litellm.Timeout):
        _ask(_router(num_retries=0, timeout=0.05), asynchronous=asynchronous, stream=stream)
    eventually(lambda: not llm.live)
    gate.set()


@STYLES
def test_a_slow_first_deployment_is_fallen_back_from(
    provider: MinivllmProvider, llm: Any, backup: FakeLLM, asynchronous: bool, stream: bool
) -> None:
    gate = threading.Event()
    llm.steps = [gate]
    router = _router(num_retries=0, timeout=0.25, fallbacks=[{"first": ["second"]}])  # the second has no longer, either
    assert _ask(router, asynchronous=asynchronous, stream=stream) == "from backup"
    gate.set()


@pytest.mark.usefixtures("no_logging_worker")  # the plain call runs a loop of its own
@pytest.mark.parametrize("asynchronous", [False, True])
def test_fallbacks_without_a_router(provider: MinivllmProvider, llm: Any, backup: FakeLLM, asynchronous: bool) -> None:
    llm.refusals = [EngineDeadError("out of blocks")]
    kwargs: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "fallbacks": ["minivllm/backup"]}
    answer: Any = asyncio.run(litellm.acompletion(**kwargs)) if asynchronous else litellm.completion(**kwargs)
    assert answer.choices[0].message.content == "from backup"


# --- refused by a policy ------------------------------------------------------------------------------------------------------


@STYLES
def test_the_router_retries_what_a_policy_refused(provider: MinivllmProvider, llm: Any, asynchronous: bool, stream: bool) -> None:
    """A policy decides on the engine's thread, so its refusal comes when the answer is read."""
    llm.steps = lambda submission: [RequestRejectedError("too many", retry_after=0.0)] if len(llm.submissions) < 3 else REPLY
    assert _ask(_router(num_retries=2), asynchronous=asynchronous, stream=stream) == TEXT
    assert len(llm.submissions) == 3


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("seconds", "header"), [(2.4, "3"), (0.0, "1"), (30, "30")])
def test_a_refusal_says_when_to_come_back(
    provider: MinivllmProvider, llm: Any, asynchronous: bool, seconds: float, header: str
) -> None:
    llm.steps = [RequestRejectedError("tenant 'acme' has used its share", retry_after=seconds)]
    kwargs: dict[str, Any] = {"model": MODEL, "messages": MESSAGES}
    with pytest.raises(litellm.RateLimitError, match="acme") as caught:
        asyncio.run(litellm.acompletion(**kwargs)) if asynchronous else litellm.completion(**kwargs)
    error: Any = caught.value
    assert error.retry_after == seconds
    assert error.response.headers["retry-after"] == error.headers["retry-after"] == header
    with pytest.raises(litellm.ServiceUnavailableError) as wrapped:  # LiteLLM's MidStreamFallbackError
        list(litellm.completion(**kwargs, stream=True))
    assert wrapped.value.original_exception.retry_after == seconds  # type: ignore[attr-defined]


def test_a_refusal_without_a_time_names_none() -> None:
    error: Any = litellm_error(RequestRejectedError("too many"), "fake")
    assert type(error) is litellm.RateLimitError
    assert "retry-after" not in error.response.headers
