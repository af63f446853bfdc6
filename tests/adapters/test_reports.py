"""What an answer tells beside its text: log-probabilities, several choices, echo and the best of several, in every call style.

(Kind: C10 at the door, and the finish reasons of G03 for several choices.)
"""

import asyncio
import json
import math
from typing import Any

import litellm
import pytest
from fake_llm import REPLY, End, Token

from minivllm_adapters.handler import MinivllmProvider
from minivllm_plugin.errors import RequestFailedError
from minivllm_plugin.serving.logprobs import Logprob

MODEL = "minivllm/fake"
MESSAGES = [{"role": "user", "content": "hello there"}]
UNLIKELY = Token("no", {7: Logprob(-3.0, 4, "no"), 1: Logprob(-0.1, 1, "yes"), 2: Logprob(-2.0, 2, "si")})
LIKELY = Token(" way", {8: Logprob(-0.2, 1, " way"), 9: Logprob(-1.5, 2, " man")})
IMPOSSIBLE = Token("!", {3: Logprob(-math.inf, 9, "!"), 8: Logprob(-0.2, 1, " way")})
BOTH = pytest.mark.parametrize("asynchronous", [False, True])


def _ask(**kwargs: Any) -> Any:
    return litellm.completion(**{"model": MODEL, "messages": MESSAGES, **kwargs})


def _chunks(*, asynchronous: bool, **kwargs: Any) -> list[Any]:
    async def read() -> list[Any]:
        stream: Any = await litellm.acompletion(model=MODEL, messages=MESSAGES, stream=True, **kwargs)
        return [chunk async for chunk in stream]

    return asyncio.run(read()) if asynchronous else list(_ask(stream=True, **kwargs))


def _told(chunks: list[Any], index: int = 0) -> list[Any]:
    """The log-probabilities of a stream's choice, joined."""
    found = [c.logprobs for chunk in chunks for c in chunk.choices if c.index == index and getattr(c, "logprobs", None)]
    return [entry for logprobs in found for entry in logprobs.content]


# --- log-probabilities --------------------------------------------------------------------------------------------------------


def test_the_chosen_token_is_told_even_when_it_is_not_among_the_likeliest(provider: MinivllmProvider, llm: Any) -> None:
    llm.steps = [UNLIKELY, LIKELY]
    first, second = _ask(logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("no", -3.0, list(b"no"))
    assert [(top.token, top.logprob) for top in first.top_logprobs] == [("yes", -0.1), ("si", -2.0)]
    assert [(top.token, top.logprob) for top in second.top_logprobs] == [(" way", -0.2), (" man", -1.5)]
    assert llm.submissions[-1].params.logprobs == 2


def test_without_top_logprobs_only_the_chosen_one_is_told(provider: MinivllmProvider, llm: Any) -> None:
    llm.steps = [UNLIKELY, LIKELY]
    entries = _ask(logprobs=True).choices[0].logprobs.content
    assert [(entry.token, entry.top_logprobs) for entry in entries] == [("no", []), (" way", [])]
    assert llm.submissions[-1].params.logprobs == 0


def test_nothing_is_told_unless_it_is_asked_for(provider: MinivllmProvider, llm: Any) -> None:
    for params in ({}, {"logprobs": False}, {"logprobs": None}):
        assert getattr(_ask(**params).choices[0], "logprobs", None) is None
        assert llm.submissions[-1].params.logprobs is None
    assert not _told(_chunks(asynchronous=False))


def test_what_cannot_happen_is_a_finite_number(provider: MinivllmProvider, llm: Any) -> None:
    """JSON has no infinity; OpenAI's API and vLLM say -9999."""
    llm.steps = [IMPOSSIBLE]
    answer = _ask(logprobs=True, top_logprobs=1)
    assert answer.choices[0].logprobs.content[0].logprob == -9999.0
    json.loads(answer.model_dump_json(), parse_constant=pytest.fail)


@BOTH
def test_a_stream_tells_the_same(provider: MinivllmProvider, llm: Any, asynchronous: bool) -> None:
    llm.steps = [UNLIKELY, Token("", {5: Logprob(-0.3, 1, "\ufffd")}), LIKELY, IMPOSSIBLE]
    params: Any = {"logprobs": True, "top_logprobs": 2}
    whole = _ask(**params).choices[0].logprobs.content
    chunks = _chunks(asynchronous=asynchronous, **params)
    assert [entry.model_dump() for entry in _told(chunks)] == [entry.model_dump() for entry in whole]
    assert len(whole) == len(llm.steps)  # a token without text has its place, too
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt is not None
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "no way!"


@BOTH
def test_the_last_tokens_of_a_stop_string_and_of_an_empty_answer_are_told(
    provider: MinivllmProvider, llm: Any, asynchronous: bool
) -> None:
    """Their text goes nowhere, and LiteLLM drops what stands on the chunk with the reason."""
    for steps, stop in ((["a", "b", "STOP"], "STOP"), ([Token("", {0: Logprob(-0.1, 1, "<end>")})], None)):
        llm.steps = steps
        chunks = _chunks(asynchronous=asynchronous, logprobs=True, stop=stop)
        assert len(_told(chunks)) == len(steps)
        assert len(_ask(logprobs=True, stop=stop).choices[0].logprobs.content) == len(steps)


@BOTH
def test_each_choice_tells_its_own(provider: MinivllmProvider, llm: Any, asynchronous: bool) -> None:
    llm.steps = lambda submission: [LIKELY] if submission.choice else [UNLIKELY, UNLIKELY]
    whole = _ask(n=2, logprobs=True)
    assert [[entry.token for entry in c.logprobs.content] for c in whole.choices] == [["no", "no"], [" way"]]
    chunks = _chunks(asynchronous=asynchronous, n=2, logprobs=True)
    assert [[entry.token for entry in _told(chunks, index)] for index in (0, 1)] == [["no", "no"], [" way"]]


def test_prompt_logprobs_stand_where_vllms_server_has_them(provider: MinivllmProvider, llm: Any) -> None:
    answer = _ask(prompt_logprobs=1)
    assert answer.prompt_logprobs[0] is None
    assert answer.prompt_logprobs[1:] == [
        {str(token): {"logprob": -0.25, "rank": 1, "decoded_token": f"p{token}"}}
        for token in range(1, answer.usage.prompt_tokens)
    ]
    assert "prompt_logprobs" not in _ask().model_dump()


# --- several choices ----------------------------------------------------------------------------------------------------------

REASONS: list[list[str]] = [["stop", "length"], ["length", "stop", "stop"], ["length"] * 3, ["stop", "stop"]]


@BOTH
@pytest.mark.parametrize("reasons", REASONS, ids=str)
def test_each_choice_of_a_stream_has_its_own_end(
    provider: MinivllmProvider, llm: Any, reasons: list[str], asynchronous: bool
) -> None:
    llm.steps = lambda submission: [*(f"{submission.choice}" * (3 - submission.choice)), End(reasons[submission.choice])]
    n = len(reasons)
    texts = [f"{index}" * (3 - index) for index in range(n)]
    whole = _ask(n=n)
    assert [(c.index, c.message.content, c.finish_reason) for c in whole.choices] == list(
        zip(range(n), texts, reasons, strict=True)
    )
    chunks = _chunks(asynchronous=asynchronous, n=n, stream_options={"include_usage": True})
    rebuilt = litellm.stream_chunk_builder(chunks)
    assert rebuilt is not None
    found = [(c.index, c.message.content, c.finish_reason) for c in rebuilt.choices]  # type: ignore[union-attr]
    assert found == list(zip(range(n), texts, reasons, strict=True))
    ends = [(c.index, c.finish_reason) for chunk in chunks for c in chunk.choices if c.finish_reason]
    assert sorted(ends) == list(enumerate(reasons))
    roles = [(c.index, c.delta.role) for chunk in chunks for c in chunk.choices if c.delta.role]
    assert sorted(roles) == [(index, "assistant") for index in range(n)]
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, sum(map(len, texts)))
    assert whole.usage.completion_tokens == usage.completion_tokens


@BOTH
def test_an_empty_choice_among_others(provider: MinivllmProvider, llm: Any, asynchronous: bool) -> None:
    for empty in (0, 1):
        llm.steps = lambda submission, empty=empty: [] if submission.choice == empty else ["x"]
        rebuilt = litellm.stream_chunk_builder(_chunks(asynchronous=asynchronous, n=2))
        assert rebuilt is not None
        texts = {c.index: (c.message.content or "", c.finish_reason) for c in rebuilt.choices}  # type: ignore[union-attr]
        assert texts == {empty: ("", "stop"), 1 - empty: ("x", "stop")}


@BOTH
def test_a_failing_choice_ends_the_stream_after_what_was_delivered(
    provider: MinivllmProvider, llm: Any, asynchronous: bool
) -> None:
    llm.steps = lambda submission: ["a", "b", RequestFailedError("NaN logits")] if submission.choice else ["c"] * 9
    seen: list[str] = []

    async def read() -> None:
        async for chunk in await litellm.acompletion(model=MODEL, messages=MESSAGES, stream=True, n=2):  # type: ignore[union-attr]
            seen.extend(c.delta.content for c in chunk.choices if c.delta.content)

    with pytest.raises(litellm.ServiceUnavailableError, match="NaN"):  # MidStreamFallbackError is one
        if asynchronous:
            asyncio.run(read())
        else:
            for chunk in _ask(stream=True, n=2):
                seen.extend(c.delta.content for c in chunk.choices if c.delta.content)
    assert sorted(seen) == ["a", "b", "c", "c", "c"]
    assert not llm.live


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_choice_that_was_taken_away_is_no_normal_end(provider: MinivllmProvider, llm: Any, reason: str) -> None:
    llm.steps = lambda submission: ["a", End("stop" if submission.choice else reason)]
    with pytest.raises(litellm.ServiceUnavailableError):
        _chunks(asynchronous=False, n=2)
    with pytest.raises(litellm.InternalServerError):
        _ask(n=2)


# --- text completions ---------------------------------------------------------------------------------------------------------


def _complete(**kwargs: Any) -> Any:
    return litellm.text_completion(**{"model": MODEL, "prompt": "Once upon", **kwargs})


def test_echo_puts_the_prompt_before_each_completion(provider: MinivllmProvider, llm: Any) -> None:
    llm.steps = [" a", " time"]
    assert _complete(echo=True).choices[0].text == "Once upon a time"
    assert _complete(echo=False).choices[0].text == " a time"
    several = _complete(prompt=["Once", "Twice"], echo=True, n=2)
    assert [choice.text for choice in several.choices] == ["Once a time"] * 2 + ["Twice a time"] * 2
    assert several.usage.completion_tokens == 8  # the prompt's own are not counted again


def test_the_likeliest_of_several_are_returned(provider: MinivllmProvider, llm: Any) -> None:
    def steps(submission: Any) -> list[Any]:
        value = (-2.0, -0.5, -1.0)[submission.choice]
        text = f"choice {submission.choice}"
        return [Token(text, {1: Logprob(value, 1, text)})] * (3 - submission.choice)  # longer ones are not at a disadvantage

    llm.steps = steps
    answer = _complete(best_of=3, n=2)
    assert [(c.index, c.text) for c in answer.choices] == [(0, "choice 1" * 2), (1, "choice 2")]
    assert answer.usage.completion_tokens == 6  # what was generated, as OpenAI counts it
    assert (llm.submissions[-1].params.n, llm.submissions[-1].params.logprobs) == (3, 0)
    assert _complete(best_of=2).choices[0].text == "choice 1" * 2


@BOTH
def test_choices_of_a_text_stream(provider: MinivllmProvider, llm: Any, asynchronous: bool) -> None:
    llm.steps = lambda submission: [f" {submission.choice}"] * 2

    async def read() -> list[Any]:
        stream: Any = await litellm.atext_completion(model=MODEL, prompt="Once", stream=True, n=2)
        return [chunk async for chunk in stream]

    chunks = asyncio.run(read()) if asynchronous else list(_complete(stream=True, n=2))
    texts = {index: "".join(c.text or "" for k in chunks for c in k.choices if c.index == index) for index in (0, 1)}
    assert texts == {0: " 0 0", 1: " 1 1"}


def test_usage_is_right_for_every_shape(provider: MinivllmProvider, llm: Any) -> None:
    for call, prompt, completion in (
        (lambda: _ask(n=4), 3, 4 * len(REPLY)),
        (lambda: _complete(prompt=["a b", "c"], n=2), 3, 4 * len(REPLY)),
        (lambda: _complete(best_of=5), 2, 5 * len(REPLY)),
    ):
        usage = call().usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (prompt, completion, prompt + completion)
