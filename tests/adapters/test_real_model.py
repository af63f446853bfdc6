"""The real SmolLM2-135M through LiteLLM: the same tokens as through the engine, whatever the door."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litellm
import pytest

import minivllm_plugin
from minivllm_plugin import LLM, SamplingParams, registry

pytestmark = [pytest.mark.model, pytest.mark.slow]

MODEL = "minivllm/smollm2-135m"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8}
PARAMS = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    yield minivllm_plugin.get_llm("smollm2-135m")
    registry.close("smollm2-135m")


@pytest.fixture(autouse=True)
def _registered(llm: LLM) -> None:
    minivllm_plugin.register()


def _ask(**kwargs: Any) -> Any:
    return litellm.completion(**{"model": MODEL, "messages": MESSAGES, **GREEDY, **kwargs})


def test_four_styles_and_the_engine_agree(llm: LLM) -> None:
    expected = llm.chat(MESSAGES, PARAMS, use_tqdm=False)[0]
    completion = expected.outputs[0]

    async def ask() -> tuple[Any, list[Any]]:
        answer = await litellm.acompletion(model=MODEL, messages=MESSAGES, **GREEDY)
        stream: Any = await litellm.acompletion(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
        return answer, [chunk async for chunk in stream]

    awaited, achunks = asyncio.run(ask())
    for answer in (_ask(), awaited):
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (completion.text, completion.finish_reason)
        assert answer.usage.prompt_tokens == len(expected.prompt_token_ids)
        assert answer.usage.completion_tokens == len(completion.token_ids)
    for chunks in (list(_ask(stream=True, stream_options={"include_usage": True})), achunks):
        assert len(chunks) >= 3  # text, usage and reason; a reader who lags gets its text in few pieces
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == completion.text
        assert chunks[-1].usage.prompt_tokens == len(expected.prompt_token_ids)
        assert chunks[-1].usage.completion_tokens == len(completion.token_ids)


def test_parameters_have_their_effect(llm: LLM) -> None:
    text = _ask().choices[0].message.content
    word = text.split()[1]
    for stop in (word, ["nowhere", word]):
        answer = _ask(stop=stop)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (text[: text.index(word)], "stop")
    for limit in ({"max_tokens": 2}, {"max_tokens": None, "max_completion_tokens": 2}):
        answer = _ask(**limit)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (2, "length")
    for only_the_likeliest in ({"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"extra_body": {"top_k": 1}}):
        assert (
            _ask(temperature=1.0, **only_the_likeliest, max_tokens=3).choices[0].message.content
            == _ask(max_tokens=3).choices[0].message.content
        )
    seeded = [_ask(temperature=1.5, seed=7, max_tokens=4, n=n) for n in (1, 3)]
    assert seeded[0].choices[0].message.content == seeded[1].choices[0].message.content
    assert len({choice.message.content for choice in seeded[1].choices}) > 1
    [end] = [*llm.tokenizer.encode(f" {word}")] if llm.tokenizer else [0]
    assert _ask(stop_token_ids=[end]).usage.completion_tokens == 2
    assert _ask(ignore_eos=True, max_tokens=12).usage.completion_tokens == 12


def test_a_repeated_prompt_is_found_in_the_cache(llm: LLM) -> None:
    _ask()
    assert _ask().usage.prompt_tokens_details.cached_tokens > 0
    assert _ask(cache_salt="somebody else's").usage.prompt_tokens_details.cached_tokens == 0


def test_text_completion_equals_generate(llm: LLM) -> None:
    prompts = ["The capital of France is", "Water boils at"]
    expected = llm.generate(prompts, PARAMS, use_tqdm=False)
    answer: Any = litellm.text_completion(model=MODEL, prompt=prompts, **GREEDY)
    assert [choice.text for choice in answer.choices] == [output.outputs[0].text for output in expected]
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in expected)
    ids: Any = litellm.text_completion(model=MODEL, prompt="", prompt_token_ids=expected[0].prompt_token_ids, **GREEDY)
    assert ids.choices[0].text == expected[0].outputs[0].text


def test_batches_responses_and_concurrent_callers(llm: LLM) -> None:
    text = _ask().choices[0].message.content
    answers = litellm.batch_completion(model=MODEL, messages=[MESSAGES] * 4, **GREEDY)
    assert [answer.choices[0].message.content for answer in answers] == [text] * 4
    response: Any = litellm.responses(
        model=MODEL, input=MESSAGES[1]["content"], instructions=MESSAGES[0]["content"], temperature=0, max_output_tokens=8
    )
    assert response.output[0].content[0].text == text

    async def ask() -> list[Any]:
        return await asyncio.gather(*(litellm.acompletion(model=MODEL, messages=MESSAGES, **GREEDY) for _ in range(8)))

    assert {answer.choices[0].message.content for answer in asyncio.run(ask())} == {text}


def test_a_path_names_a_model_too(smollm2_gguf: Path) -> None:
    name = str(smollm2_gguf)
    assert name.startswith("/")
    try:
        assert _ask(model=f"minivllm/{name}").choices[0].message.content == _ask().choices[0].message.content
    finally:
        registry.close(name)


def test_a_conversation_longer_than_the_window(llm: LLM) -> None:
    messages = [{"role": "user", "content": "word " * (llm.max_model_len + 1)}]
    for stream in (False, True):
        with pytest.raises(litellm.ContextWindowExceededError, match=str(llm.max_model_len)):
            _ask(messages=messages, stream=stream)


def test_litellm_knows_the_window(llm: LLM) -> None:
    _ask()
    assert litellm.get_model_info(MODEL)["max_input_tokens"] == llm.max_model_len
