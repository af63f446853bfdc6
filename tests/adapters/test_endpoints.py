"""LiteLLM's other doors to the same provider: text completions, batches, responses, Anthropic messages, many loops at once."""

import asyncio
import threading
from typing import Any

import litellm
import pytest
from eventually import eventually
from fake_llm import REPLY

from minivllm_adapters.handler import MinivllmProvider
from minivllm_plugin.errors import ContextWindowExceededError

MODEL = "minivllm/fake"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "".join(str(step) for step in REPLY)
LENGTH = len(REPLY)


# --- text completions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_raw_prompt_gets_no_chat_template(provider: MinivllmProvider, llm: Any, asynchronous: bool) -> None:
    kwargs: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 5}
    answer: Any = asyncio.run(litellm.atext_completion(**kwargs)) if asynchronous else litellm.text_completion(**kwargs)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Paris is the capital of", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 5)
    assert answer.id.startswith("cmpl-")
    assert (llm.submissions[-1].chat, llm.submissions[-1].prompt) == (False, "Once upon a time")


def test_a_list_of_prompts_gives_a_choice_each(provider: MinivllmProvider, llm: Any) -> None:
    llm.steps = lambda submission: [submission.prompt.upper(), f" {submission.choice}"]
    answer: Any = litellm.text_completion(model=MODEL, prompt=["a", "b c"], n=2, seed=1)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "A 0"), (1, "A 1"), (2, "B C 0"), (3, "B C 1")]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 8)


def test_token_ids_as_prompt(provider: MinivllmProvider, llm: Any) -> None:
    answer: Any = litellm.text_completion(model=MODEL, prompt="", prompt_token_ids=[[5, 6, 7], [8]])
    assert [s.prompt for s in llm.submissions] == [[5, 6, 7], [8]]
    assert answer.usage.prompt_tokens == 4
    assert len(answer.choices) == 2


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_text_completion_streams(provider: MinivllmProvider, llm: Any, asynchronous: bool) -> None:
    kwargs: dict[str, Any] = {"model": MODEL, "prompt": "Once", "stream": True, "stream_options": {"include_usage": True}}

    async def read() -> list[Any]:
        return [chunk async for chunk in await litellm.atext_completion(**kwargs)]  # type: ignore[union-attr]

    chunks: list[Any] = asyncio.run(read()) if asynchronous else list(litellm.text_completion(**kwargs))
    assert "".join(c.choices[0].text or "" for c in chunks if c.choices) == TEXT
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (1, LENGTH)


def test_dropping_a_text_stream_aborts(provider: MinivllmProvider, llm: Any) -> None:
    gate = threading.Event()
    llm.steps = ["a", gate]
    stream = litellm.text_completion(model=MODEL, prompt="Once", stream=True)
    next(stream)
    del stream
    eventually(lambda: not llm.live)
    assert len(llm.aborted) == 1


# --- batches ------------------------------------------------------------------------------------------------------------------


def test_a_batch_runs_side_by_side_and_keeps_its_order(provider: MinivllmProvider, llm: Any) -> None:
    everybody_is_there = threading.Event()

    def steps(submission: Any) -> list[Any]:
        if len(llm.live) == 4:
            everybody_is_there.set()
        return [everybody_is_there, submission.prompt[0]["content"]]

    llm.steps = steps
    answers = litellm.batch_completion(model=MODEL, messages=[[{"role": "user", "content": name}] for name in "abcd"])
    assert [answer.choices[0].message.content for answer in answers] == list("abcd")
    assert [answer.usage.completion_tokens for answer in answers] == [1] * 4


def test_one_bad_request_of_a_batch_fails_alone(provider: MinivllmProvider, llm: Any) -> None:
    bad, good = [{"role": "user", "content": "bad"}], [{"role": "user", "content": "good"}]

    def steps(submission: Any) -> list[Any]:
        return [ContextWindowExceededError("too long")] if submission.prompt[0]["content"] == "bad" else ["fine"]

    llm.steps = steps
    first, second = litellm.batch_completion(model=MODEL, messages=[bad, good])
    assert type(first) is litellm.ContextWindowExceededError
    assert second.choices[0].message.content == "fine"


# --- responses and messages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asynchronous", [False, True])
def test_responses(provider: MinivllmProvider, llm: Any, asynchronous: bool) -> None:
    kwargs: dict[str, Any] = {
        "model": MODEL,
        "input": "What is the capital of France?",
        "instructions": "Be brief.",
        "max_output_tokens": 3,
        "temperature": 0,
    }
    answer: Any = asyncio.run(litellm.aresponses(**kwargs)) if asynchronous else litellm.responses(**kwargs)
    assert answer.output[0].content[0].text == "Paris is the"
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (10, 3)
    assert answer.usage.input_tokens_details.cached_tokens == llm.num_cached_tokens
    sent = llm.submissions[-1]
    assert [m["role"] for m in sent.prompt] == ["system", "user"]
    assert (sent.params.max_tokens, sent.params.temperature) == (3, 0)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_responses_stream(provider: MinivllmProvider, llm: Any, asynchronous: bool) -> None:
    kwargs: dict[str, Any] = {"model": MODEL, "input": "What is the capital of France?", "stream": True}

    async def read() -> list[Any]:
        return [event async for event in await litellm.aresponses(**kwargs)]  # type: ignore[union-attr]

    events: list[Any] = asyncio.run(read()) if asynchronous else list(litellm.responses(**kwargs))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert deltas == list(REPLY)
    assert events[-1].type == "response.completed"
    usage = events[-1].response.usage
    assert (usage.input_tokens, usage.output_tokens) == (7, LENGTH)


def test_responses_refuse_what_the_provider_refuses(provider: MinivllmProvider, llm: Any) -> None:
    with pytest.raises(litellm.UnsupportedParamsError, match="service_tier"):
        litellm.responses(model=MODEL, input="hello", service_tier="flex")
    assert not llm.submissions


def test_anthropic_messages(provider: MinivllmProvider, llm: Any) -> None:
    answer: Any = asyncio.run(
        litellm.anthropic.messages.acreate(model=MODEL, messages=MESSAGES, max_tokens=3, system="Be brief.")
    )
    assert answer["content"][0]["text"] == "Paris is the"
    assert answer["stop_reason"] == "max_tokens"
    assert answer["usage"]["output_tokens"] == 3


# --- several loops ------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_logging_worker")
def test_fifty_callers_on_five_loops(provider: MinivllmProvider, registry: Any, llm: Any) -> None:
    """Half of them stream; all are there at once before the first token comes; everybody gets their own answer."""
    registry.gate.clear()
    everybody_is_there = threading.Event()

    def steps(submission: Any) -> list[Any]:
        if len(llm.submissions) == 50:
            everybody_is_there.set()
        return [everybody_is_there, *f"answer to {submission.prompt[0]['content']}".split(" ")]

    llm.steps = steps
    answers: dict[str, str] = {}

    async def one(name: str, stream: bool) -> None:
        messages = [{"role": "user", "content": name}]
        answer: Any = await litellm.acompletion(model=MODEL, messages=messages, stream=stream)
        if stream:
            answers[name] = "".join([chunk.choices[0].delta.content or "" async for chunk in answer])
        else:
            answers[name] = answer.choices[0].message.content

    async def ten(loop_name: str) -> None:
        await asyncio.gather(*(one(f"{loop_name}{i}", i % 2 == 0) for i in range(10)))

    loops = [threading.Thread(target=lambda name=name: asyncio.run(ten(name))) for name in "abcde"]
    for loop in loops:
        loop.start()
    eventually(lambda: registry.load_threads)
    registry.gate.set()
    for loop in loops:
        loop.join(60)
    assert answers == {f"{loop}{i}": f"answerto{loop}{i}" for loop in "abcde" for i in range(10)}
    assert registry.load_threads == ["minivllm-load-fake"]
    assert not llm.live
