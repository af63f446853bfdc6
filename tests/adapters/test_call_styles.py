"""All ways to ask give the same answer: text, finish reason, usage, ids. (Kinds: G01, G03, the usage half of G08.)"""

import asyncio
from typing import Any

import litellm
import pytest
from fake_llm import REPLY, End

from minivllm_adapters.handler import MinivllmProvider

MODEL = "minivllm/fake"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
TEXT = "".join(str(step) for step in REPLY)


def _sync(**kwargs: Any) -> Any:
    return litellm.completion(model=MODEL, messages=MESSAGES, **kwargs)


def _async(**kwargs: Any) -> Any:
    return asyncio.run(litellm.acompletion(model=MODEL, messages=MESSAGES, **kwargs))


def _sync_chunks(**kwargs: Any) -> list[Any]:
    return list(litellm.completion(model=MODEL, messages=MESSAGES, stream=True, **kwargs))


def _async_chunks(**kwargs: Any) -> list[Any]:
    async def read() -> list[Any]:
        stream = await litellm.acompletion(model=MODEL, messages=MESSAGES, stream=True, **kwargs)
        return [chunk async for chunk in stream]

    return asyncio.run(read())


WHOLE = pytest.mark.parametrize("ask", [_sync, _async])
STREAMED = pytest.mark.parametrize("read", [_sync_chunks, _async_chunks])
ENDS: list[tuple[list[Any], dict[str, Any], str, str]] = [
    (list(REPLY), {}, TEXT, "stop"),
    (list(REPLY), {"max_tokens": 3}, "Paris is the", "length"),
    (list(REPLY), {"stop": " of"}, "Paris is the capital", "stop"),
    ([*REPLY, End("length")], {}, TEXT, "length"),  # window full: the engine says so
    ([End("stop")], {}, "", "stop"),  # an empty completion
]


def _text(chunks: list[Any]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def _counts(usage: Any) -> tuple[int, int, int, int]:
    return usage.prompt_tokens, usage.completion_tokens, usage.total_tokens, usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize(("steps", "params", "text", "reason"), ENDS)
def test_all_four_call_styles_agree(
    provider: MinivllmProvider, llm: Any, steps: Any, params: Any, text: str, reason: str
) -> None:
    llm.steps = steps
    counts = set()
    for ask in (_sync, _async):
        answer = ask(**params)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text, reason)
        assert answer.choices[0].message.role == "assistant"
        counts.add(_counts(answer.usage))
    for read in (_sync_chunks, _async_chunks):
        chunks = read(stream_options={"include_usage": True}, **params)
        assert _text(chunks) == text
        assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [reason]
        counts.add(_counts(chunks[-1].usage))
    assert len(counts) == 1
    prompt, completion, total, cached = counts.pop()
    assert prompt == 7
    assert total == prompt + completion
    assert cached == llm.num_cached_tokens


@STREAMED
def test_a_stream_has_many_chunks_role_first_and_one_reason_last(provider: MinivllmProvider, read: Any) -> None:
    chunks = read()
    assert len(chunks) == len(REPLY) + 1
    assert [chunk.choices[0].delta.role for chunk in chunks[:-1]] == ["assistant"] + [None] * (len(REPLY) - 1)
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * len(REPLY) + ["stop"]
    assert not chunks[-1].choices[0].delta.content
    assert len({(chunk.id, chunk.model, chunk.object) for chunk in chunks}) == 1


@STREAMED
def test_usage_comes_last_without_choices_and_only_when_asked_for(provider: MinivllmProvider, read: Any) -> None:
    assert all(getattr(chunk, "usage", None) is None for chunk in read())
    chunks = read(stream_options={"include_usage": True})
    assert chunks[-1].choices == []
    assert _counts(chunks[-1].usage) == (7, len(REPLY), 7 + len(REPLY), 3)
    assert all(getattr(chunk, "usage", None) is None for chunk in chunks[:-1])


@STREAMED
def test_no_cached_token_is_a_zero_and_not_a_gap(provider: MinivllmProvider, llm: Any, read: Any) -> None:
    llm.num_cached_tokens = 0
    assert _counts(read(stream_options={"include_usage": True})[-1].usage) == _counts(_sync().usage)
    assert _counts(_sync().usage)[3] == 0


@STREAMED
def test_an_empty_completion_still_says_whose_it_is(provider: MinivllmProvider, llm: Any, read: Any) -> None:
    llm.steps = [End("stop")]
    first, last = read()
    assert first.choices[0].delta.role == "assistant"
    assert last.choices[0].finish_reason == "stop"


@STREAMED
def test_a_hundred_equal_tokens_are_no_error(provider: MinivllmProvider, llm: Any, read: Any) -> None:
    """LiteLLM's other chunk type fails after 100 repetitions, which kills a long dashed line."""
    llm.steps = ["-"] * 150
    assert _text(read()) == "-" * 150


@STREAMED
def test_a_token_without_text_makes_no_chunk(provider: MinivllmProvider, llm: Any, read: Any) -> None:
    llm.steps = ["", "", "é", "", "!"]  # halves of a character are held back by the engine's stream
    chunks = read(stream_options={"include_usage": True})
    assert [chunk.choices[0].delta.content for chunk in chunks[:2]] == ["é", "!"]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 5


@STREAMED
def test_a_rebuilt_stream_equals_the_whole_answer(provider: MinivllmProvider, read: Any) -> None:
    rebuilt = litellm.stream_chunk_builder(read(stream_options={"include_usage": True}), messages=MESSAGES)
    whole = _sync()
    assert rebuilt is not None
    assert rebuilt.choices[0].message.content == whole.choices[0].message.content  # type: ignore[union-attr]
    assert _counts(rebuilt.usage) == _counts(whole.usage)  # type: ignore[attr-defined]


@WHOLE
def test_several_choices_are_one_request(provider: MinivllmProvider, llm: Any, ask: Any) -> None:
    llm.steps = lambda submission: ["choice", f" {submission.choice}"]
    answer = ask(n=3, seed=7)
    assert [(c.index, c.message.content) for c in answer.choices] == [(0, "choice 0"), (1, "choice 1"), (2, "choice 2")]
    assert _counts(answer.usage) == (7, 6, 13, 3)  # the prompt is counted once, as OpenAI does
    [sent] = llm.submissions
    assert (sent.params.n, sent.params.seed) == (3, 7)


@WHOLE
def test_ids_lead_from_the_answer_to_the_request(provider: MinivllmProvider, llm: Any, ask: Any) -> None:
    assert ask(request_id="mine").id == "chatcmpl-mine"
    assert llm.submissions[-1].options["request_id"] == "mine"
    assert ask(request_id="mine", n=2).id == "chatcmpl-mine"
    assert llm.submissions[-1].options["request_id"] == "mine"


def test_ids_of_several_prompts_are_numbered(provider: MinivllmProvider, llm: Any) -> None:
    answer: Any = litellm.text_completion(model=MODEL, prompt=["a", "b"], request_id="mine")
    assert answer.id == "cmpl-mine"
    assert [s.options["request_id"] for s in llm.submissions] == ["mine-0", "mine-1"]


@pytest.mark.parametrize("name", ["org/name", "fake"])
def test_names_with_slashes_arrive_whole(provider: MinivllmProvider, registry: Any, name: str) -> None:
    answer = litellm.completion(model=f"minivllm/{name}", messages=MESSAGES)
    assert answer.model == name
    assert list(registry.loaded()) == [name]


def test_a_path_arrives_whole(provider: MinivllmProvider, registry: Any, llm: Any, tmp_path: Any) -> None:
    for path in (tmp_path / "model.gguf", "./models/tiny.gguf"):
        registry.llms[str(path)] = llm
        assert litellm.completion(model=f"minivllm/{path}", messages=MESSAGES).model == str(path)


def test_no_litellm_code_runs_on_a_thread_of_the_engine(provider: MinivllmProvider, llm: Any) -> None:
    """The adapter submits from the caller's side: its thread, or a worker of its loop; never the loop's own thread."""
    _sync()
    assert llm.submissions[-1].thread == "MainThread"
    for ask in (_async, _async_chunks):
        ask()
        assert llm.submissions[-1].thread.startswith("asyncio_")
