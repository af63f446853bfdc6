"""What LiteLLM tells others about a call: callbacks, its cache, its table of models."""

import asyncio
import threading
from typing import Any

import litellm
import pytest
from eventually import aeventually
from fake_llm import REPLY
from litellm.caching.caching import Cache
from litellm.integrations.custom_logger import CustomLogger

from minivllm_adapters.handler import MinivllmProvider
from minivllm_plugin.errors import ContextWindowExceededError

MODEL = "minivllm/fake"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "".join(str(step) for step in REPLY)
LENGTH = len(REPLY)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_callbacks_get_the_usage(provider: MinivllmProvider, llm: Any, asynchronous: bool, stream: bool) -> None:
    seen: list[dict[str, Any]] = []
    done = threading.Event()

    class Logger(CustomLogger):
        def log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            self._note(kwargs)

        async def async_log_success_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            self._note(kwargs)

        def _note(self, kwargs: Any) -> None:
            payload = kwargs.get("standard_logging_object")
            if payload and payload["id"] == "chatcmpl-watched" and payload["completion_tokens"]:
                seen.append(payload)
                done.set()

    litellm.callbacks = [Logger()]

    async def ask() -> None:
        answer: Any = await litellm.acompletion(model=MODEL, messages=MESSAGES, stream=stream, request_id="watched")
        if stream:
            async for _ in answer:
                pass
        await asyncio.to_thread(done.wait, 30)

    if asynchronous:
        asyncio.run(ask())
    else:
        answer = litellm.completion(model=MODEL, messages=MESSAGES, stream=stream, request_id="watched")
        _ = list(answer) if stream else answer
    assert done.wait(30)
    assert (seen[0]["prompt_tokens"], seen[0]["completion_tokens"]) == (7, LENGTH)
    assert seen[0]["custom_llm_provider"] == "minivllm"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_callbacks_hear_of_failures(provider: MinivllmProvider, llm: Any, asynchronous: bool, stream: bool) -> None:
    heard: list[Any] = []
    done = threading.Event()

    class Logger(CustomLogger):
        def log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            heard.append(kwargs["exception"])
            done.set()

        async def async_log_failure_event(self, kwargs: Any, response_obj: Any, start_time: Any, end_time: Any) -> None:
            self.log_failure_event(kwargs, response_obj, start_time, end_time)

    litellm.callbacks = [Logger()]
    llm.refusals = [ContextWindowExceededError("9000 tokens, the window is 8192")]

    async def ask() -> None:
        with pytest.raises(litellm.ContextWindowExceededError):
            await litellm.acompletion(model=MODEL, messages=MESSAGES, stream=stream)
        await asyncio.to_thread(done.wait, 30)

    if asynchronous:
        asyncio.run(ask())
    else:
        with pytest.raises(litellm.ContextWindowExceededError):
            litellm.completion(model=MODEL, messages=MESSAGES, stream=stream)
    assert done.wait(30)
    assert type(heard[0]) is litellm.ContextWindowExceededError


# --- LiteLLM's cache ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def _cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(litellm, "cache", Cache(type="local"))  # type: ignore[arg-type]
    for name in ("input_callback", "success_callback", "_async_success_callback"):  # where it enters itself
        monkeypatch.setattr(litellm, name, [*getattr(litellm, name)])


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("stream", [False, True])
def test_an_equal_call_is_answered_from_the_cache(provider: MinivllmProvider, llm: Any, stream: bool) -> None:
    def ask(**params: Any) -> str:
        answer: Any = litellm.completion(model=MODEL, messages=MESSAGES, caching=True, stream=stream, **params)
        if stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in answer)
        return str(answer.choices[0].message.content)

    assert ask(temperature=0) == ask(temperature=0) == TEXT
    assert len(llm.submissions) == 1
    assert ask(temperature=0.5) == TEXT
    assert len(llm.submissions) == 2


@pytest.mark.usefixtures("_cache")
@pytest.mark.parametrize("stream", [False, True])
def test_an_equal_call_on_an_event_loop_too(provider: MinivllmProvider, llm: Any, stream: bool) -> None:
    cache: Any = litellm.cache

    async def ask() -> str:
        answer: Any = await litellm.acompletion(model=MODEL, messages=MESSAGES, caching=True, stream=stream)
        if stream:
            return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
        return str(answer.choices[0].message.content)

    async def twice() -> None:
        assert await ask() == TEXT
        await aeventually(lambda: cache.cache.cache_dict)  # LiteLLM stores the answer in a task of its own
        assert await ask() == TEXT

    asyncio.run(twice())
    assert len(llm.submissions) == 1


# --- LiteLLM's model table ----------------------------------------------------------------------------------------------------


def test_the_model_is_announced_when_it_is_used(provider: MinivllmProvider, llm: Any, registry: Any, caplog: Any) -> None:
    with pytest.raises(Exception, match="isn't mapped"):
        litellm.get_model_info(MODEL)
    answer = litellm.completion(model=MODEL, messages=MESSAGES)
    info = litellm.get_model_info(MODEL)
    assert (info["litellm_provider"], info["mode"]) == ("minivllm", "chat")
    assert info["max_input_tokens"] == litellm.get_max_tokens(MODEL) == llm.max_model_len
    assert litellm.completion_cost(answer, model=MODEL) == 0.0
    for supported in (litellm.supports_function_calling, litellm.supports_response_schema):
        assert supported(MODEL)
    for unsupported in (litellm.supports_vision, litellm.supports_reasoning):
        assert not unsupported(MODEL)
    assert not [record for record in caplog.records if record.levelname == "WARNING" and "cost" in record.getMessage()]


def test_what_is_announced_is_what_the_model_has(provider: MinivllmProvider, llm: Any) -> None:
    llm.tool_format, llm.reasoning_format = "none", "think"
    litellm.completion(model=MODEL, messages=MESSAGES)
    assert litellm.supports_reasoning(MODEL)
    assert not litellm.supports_function_calling(MODEL)
    assert not litellm.supports_parallel_function_calling(MODEL)


def test_an_announcement_keeps_the_users_prices_and_follows_a_new_window(provider: MinivllmProvider, llm: Any) -> None:
    price = {"litellm_provider": "minivllm", "mode": "chat", "input_cost_per_token": 0.5, "output_cost_per_token": 0.25}
    litellm.register_model({MODEL: price})
    litellm.completion(model=MODEL, messages=MESSAGES)
    assert litellm.get_model_info(MODEL)["input_cost_per_token"] == 0.5
    llm.max_model_len = 77
    litellm.completion(model=MODEL, messages=MESSAGES)
    info = litellm.get_model_info(MODEL)
    assert (info["max_input_tokens"], info["input_cost_per_token"]) == (77, 0.5)
