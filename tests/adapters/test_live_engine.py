"""The provider over the real engine thread, scheduler, pool and streams; only the model is scripted.

(Kinds: G01, G05, G07, G08.)
"""

import asyncio
import gc
import inspect
import threading
from typing import Any

import litellm
import pytest
from eventually import eventually
from fake_llm import FakeRegistry
from live_engine import ANSWER, Live

from minivllm_plugin import SamplingParams

MODEL = "minivllm/live"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


def _ask(**kwargs: Any) -> Any:
    return litellm.completion(**{"model": MODEL, "messages": MESSAGES, **kwargs})


def _counts(usage: Any) -> tuple[int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize(
    "params", [{}, {"max_tokens": 9}, {"stop": "France"}, {"stop": ["xyz", "pit"], "include_stop_str_in_output": True}], ids=str
)
def test_four_styles_and_the_engine_itself_agree(live: Live, params: Any) -> None:
    _ask()  # from here on the prompt is in the prefix cache
    whole = _ask(**params)
    expected = live.llm.chat(MESSAGES, SamplingParams(max_tokens=None).replace(**params), use_tqdm=False)[0]
    completion = expected.outputs[0]
    counts = (len(expected.prompt_token_ids), len(completion.token_ids), expected.num_cached_tokens)
    assert counts[2] > 0

    async def ask() -> tuple[Any, list[Any]]:
        answer = await litellm.acompletion(model=MODEL, messages=MESSAGES, **params)
        stream: Any = await litellm.acompletion(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **params
        )
        return answer, [chunk async for chunk in stream]

    awaited, achunks = asyncio.run(ask())
    for answer in (whole, awaited):
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (completion.text, completion.finish_reason)
        assert _counts(answer.usage) == counts
    for chunks in (list(_ask(stream=True, stream_options={"include_usage": True}, **params)), achunks):
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == completion.text
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == completion.finish_reason
        assert _counts(chunks[-1].usage) == counts
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_a_reader_who_lags_gets_fewer_and_larger_chunks(live: Live) -> None:
    live.options["gate"] = gate = threading.Event()
    stream = _ask(stream=True)
    gate.set()
    eventually(live.idle)  # the engine is through before the reader has looked once
    chunks = list(stream)
    assert len(chunks) == 2
    assert chunks[0].choices[0].delta.content == ANSWER
    assert chunks[1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("how", ["break", "close", "aclose", "cancel", "drop"])
def test_leaving_gives_the_only_seat_to_the_one_who_waits(live: Live, how: str) -> None:
    live.options["options"]["max_num_sequences"] = 1
    live.answer = "never ending " * 60

    async def leave() -> None:
        stream: Any = await litellm.acompletion(model=MODEL, messages=MESSAGES, stream=True)
        reading = asyncio.ensure_future(anext(stream))
        await reading
        waiting = asyncio.ensure_future(litellm.acompletion(model=MODEL, messages=MESSAGES, max_tokens=4))
        if how == "aclose":
            await stream.aclose()
        elif how == "cancel":
            task = asyncio.ensure_future(_read_all(stream))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        elif how == "break":
            async for _ in stream:
                break
        elif how == "close":
            stream.close()
        del stream
        gc.collect()
        answer = await asyncio.wait_for(waiting, 60)
        assert answer.choices[0].message.content == "neve"

    asyncio.run(leave())
    eventually(live.idle)


async def _read_all(stream: Any) -> None:
    async for _ in stream:
        pass


def test_a_timeout_aborts_in_the_engine(live: Live) -> None:
    live.options["gate"] = gate = threading.Event()
    with pytest.raises(litellm.Timeout):
        _ask(timeout=0.05)
    with pytest.raises(litellm.Timeout):
        list(_ask(timeout=0.05, stream=True))
    gate.set()
    eventually(live.idle)
    assert _ask().choices[0].message.content == ANSWER


def test_refusals_of_the_real_admission(live: Live) -> None:
    window = 1024  # 256 blocks of 4
    with pytest.raises(litellm.ContextWindowExceededError, match=str(window)):
        _ask(messages=[{"role": "user", "content": "x" * 2 * window}])
    with pytest.raises(litellm.BadRequestError, match="9999"):
        _ask(stop_token_ids=[9999])
    assert live.runner.num_calls == 0
    assert _ask().choices[0].message.content == ANSWER


def test_a_full_queue_is_a_rate_limit(live: Live) -> None:
    live.options["gate"] = gate = threading.Event()
    live.options["options"] |= {"max_num_sequences": 1, "max_queue_size": 1}
    first, second = _ask(stream=True), _ask(stream=True)
    for stream in (False, True):
        with pytest.raises(litellm.RateLimitError) as caught:
            _ask(stream=stream)
        assert type(caught.value) is litellm.RateLimitError
    with pytest.raises(litellm.RateLimitError):
        asyncio.run(litellm.acompletion(model=MODEL, messages=MESSAGES, stream=True))
    gate.set()
    for stream in (first, second):
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER


def test_a_dying_engine_fails_everybody_and_the_next_call_gets_a_new_one(live: Live) -> None:
    live.options["gate"] = gate = threading.Event()
    live.options["fail_on_call"] = 3
    streams = [_ask(stream=True) for _ in range(3)]
    gate.set()
    for stream in streams:
        with pytest.raises(litellm.ServiceUnavailableError) as caught:  # MidStreamFallbackError is one
            list(stream)
        assert type(caught.value.original_exception) is litellm.InternalServerError  # type: ignore[attr-defined]
    eventually(lambda: not live.llm.is_healthy)
    del live.options["fail_on_call"]
    assert _ask().choices[0].message.content == ANSWER
    assert len(live.engines) == 2


def test_closing_the_engine_fails_its_readers_as_unavailable(live: Live) -> None:
    live.answer = "never ending " * 60
    stream = _ask(stream=True)
    next(stream)
    live.llm.close()
    with pytest.raises(litellm.ServiceUnavailableError):
        list(stream)
    live.answer = ANSWER
    assert _ask().choices[0].message.content == ANSWER  # by a new engine


def test_an_abort_by_id_is_no_normal_end(live: Live) -> None:
    live.answer = "never ending " * 60
    stream = _ask(stream=True, request_id="victim")
    next(stream)
    live.llm.abort("victim")
    with pytest.raises(litellm.ServiceUnavailableError, match="aborted"):
        list(stream)


def test_raw_prompts_and_batches(live: Live) -> None:
    answer: Any = litellm.text_completion(model=MODEL, prompt=["Hello", "Once upon"], max_tokens=3)
    assert [choice.text for choice in answer.choices] == ["The", "The"]
    assert answer.usage.prompt_tokens == len("Hello") + len("Once upon")
    answers = litellm.batch_completion(model=MODEL, messages=[MESSAGES] * 8)
    assert [answer.choices[0].message.content for answer in answers] == [ANSWER] * 8


@pytest.mark.usefixtures("no_logging_worker")
def test_many_callers_on_many_loops(live: Live) -> None:
    live.options["num_blocks"] = 100  # too few for all: requests wait and are preempted
    answers: list[str] = []

    async def one(number: int) -> None:
        messages = [{"role": "user", "content": f"caller {number}"}]
        answer: Any = await litellm.acompletion(model=MODEL, messages=messages, stream=number % 2 == 0)
        if number % 2 == 0:
            answers.append("".join([chunk.choices[0].delta.content or "" async for chunk in answer]))
        else:
            answers.append(answer.choices[0].message.content)

    async def ten() -> None:
        await asyncio.gather(*(one(number) for number in range(10)))

    loops = [threading.Thread(target=lambda: asyncio.run(ten())) for _ in range(5)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(120)
    assert answers == [ANSWER] * 50


def test_the_fakes_of_the_other_tests_have_the_api_of_the_real_thing(live: Live) -> None:
    """A fake that drifts from what it stands for proves nothing."""
    from fake_llm import FakeLLM

    from minivllm_plugin import registry

    _ask()
    fake = FakeLLM()
    for name in (
        "submit",
        "submit_chat",
        "submit_embedding",
        "default_sampling_params",
        "output_parser",
        "tool_format",
        "tokenizer",
        "max_model_len",
        "is_healthy",
    ):
        assert hasattr(live.llm, name)
        assert hasattr(fake, name)
    assert inspect.signature(live.llm.output_parser) == inspect.signature(fake.output_parser)
    real, pretended = live.llm.submit("x"), fake.submit("x", SamplingParams(), request_id=None, timeout=None)
    for name in ("request_id", "prompt_token_ids", "output", "close", "aclose", "result", "aresult", "__next__", "__anext__"):
        assert hasattr(real, name)
        assert hasattr(pretended, name)
    assert type(real.output) is type(pretended.output)
    assert type(next(real)) is type(next(pretended))
    real.close()
    for name in ("get_llm", "loaded"):
        assert hasattr(registry, name)
        assert hasattr(FakeRegistry(), name)
