"""Each failure has its LiteLLM class, in every call style, and is never replayed. (Kind: G05.)"""

import asyncio
from typing import Any

import litellm
import pytest
from fake_llm import REPLY, End

from minivllm_adapters.errors import litellm_error
from minivllm_adapters.handler import MinivllmProvider
from minivllm_plugin import errors

MODEL = "minivllm/fake"
MESSAGES = [{"role": "user", "content": "hello"}]
CLASSES: list[tuple[type[Exception], type[Exception]]] = [
    (errors.ContextWindowExceededError, litellm.ContextWindowExceededError),
    (errors.InvalidRequestError, litellm.BadRequestError),
    (errors.UnsupportedFeatureError, litellm.UnsupportedParamsError),
    (errors.ConfigError, litellm.BadRequestError),
    (errors.UnsupportedModelError, litellm.BadRequestError),
    (errors.ModelNotFoundError, litellm.NotFoundError),
    (errors.ModelDownloadError, litellm.ServiceUnavailableError),
    (errors.ModelLoadError, litellm.ServiceUnavailableError),
    (errors.QueueFullError, litellm.RateLimitError),
    (errors.RequestTimeoutError, litellm.Timeout),
    (errors.EngineClosedError, litellm.ServiceUnavailableError),
    (errors.EngineDeadError, litellm.InternalServerError),
    (errors.RequestFailedError, litellm.InternalServerError),
    (errors.RequestAbortedError, litellm.InternalServerError),
    (RuntimeError, litellm.InternalServerError),
    (MemoryError, litellm.InternalServerError),
    (TimeoutError, litellm.InternalServerError),
    (ImportError, litellm.InternalServerError),
]


def _completion(**kwargs: Any) -> Any:
    return litellm.completion(model=kwargs.pop("model", MODEL), messages=kwargs.pop("messages", MESSAGES), **kwargs)


def _acompletion(**kwargs: Any) -> Any:
    return asyncio.run(litellm.acompletion(model=kwargs.pop("model", MODEL), messages=kwargs.pop("messages", MESSAGES), **kwargs))


STYLES = {
    "completion": _completion,
    "acompletion": _acompletion,
    "streaming": lambda **kwargs: _completion(stream=True, **kwargs),
    "astreaming": lambda **kwargs: _acompletion(stream=True, **kwargs),
}
IN_EVERY_STYLE = pytest.mark.parametrize("call", STYLES.values(), ids=STYLES.keys())


def _raised(call: Any, **kwargs: Any) -> Exception:
    """What the call itself raises; for streams that is before anything is read."""
    with pytest.raises(Exception) as caught:  # the class is what the tests look at
        call(**kwargs)
    assert type(caught.value) in litellm.LITELLM_EXCEPTION_TYPES
    return caught.value


def test_every_error_of_the_package_has_a_class() -> None:
    for name in errors.__all__:
        ours = getattr(errors, name)("why")
        theirs = litellm_error(ours, "fake")
        assert type(theirs) in litellm.LITELLM_EXCEPTION_TYPES
        assert "why" in str(theirs)
        assert (theirs.llm_provider, theirs.model) == ("minivllm", "fake")  # type: ignore[attr-defined]
    assert litellm_error(theirs, "fake") is theirs


def test_causes_are_named_once() -> None:
    dead = errors.EngineDeadError("the engine thread died")
    dead.__cause__ = RuntimeError("out of blocks")
    assert "RuntimeError: out of blocks" in str(litellm_error(dead, "fake"))
    assert "ValueError" in str(litellm_error(ValueError(), "fake"))


@IN_EVERY_STYLE
@pytest.mark.parametrize(("ours", "theirs"), CLASSES)
def test_a_refusal_at_admission(provider: MinivllmProvider, llm: Any, call: Any, ours: Any, theirs: Any) -> None:
    llm.refusals = [ours("because of 17")]
    error = _raised(call)
    assert type(error) is theirs
    assert "because of 17" in str(error)
    assert (error.model, error.llm_provider) == ("fake", "minivllm")  # type: ignore[attr-defined]
    assert isinstance(error.__cause__, ours)
    assert len(llm.submissions) == 1
    assert not llm.live


@IN_EVERY_STYLE
@pytest.mark.parametrize(("ours", "theirs"), CLASSES)
def test_a_failing_load(provider: MinivllmProvider, registry: Any, call: Any, ours: Any, theirs: Any) -> None:
    registry.load_error = ours("because of 17")
    assert type(_raised(call)) is theirs
    registry.load_error = None
    call()  # and the next call starts afresh


@IN_EVERY_STYLE
def test_an_unknown_model_is_not_found(provider: MinivllmProvider, call: Any) -> None:
    error = _raised(call, model="minivllm/nobody/knows-it")
    assert type(error) is litellm.NotFoundError
    assert "nobody/knows-it" in str(error)


@IN_EVERY_STYLE
@pytest.mark.parametrize(
    "kwargs",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"max_tokens": 0},
        {"stop": ""},
        {"n": 0},
        {"timeout": -3},
        {"messages": []},
        {"chat_template_kwargs": "enable_thinking"},
        {"extra_body": ["top_k"]},
    ],
    ids=str,
)
def test_bad_values_reach_no_engine(provider: MinivllmProvider, llm: Any, call: Any, kwargs: Any) -> None:
    assert isinstance(_raised(call, **kwargs), litellm.BadRequestError)
    assert not llm.submissions


@pytest.mark.parametrize("style", ["completion", "acompletion"])
@pytest.mark.parametrize(("ours", "theirs"), CLASSES)
def test_a_failure_while_a_whole_answer_is_made(provider: MinivllmProvider, llm: Any, style: str, ours: Any, theirs: Any) -> None:
    llm.steps = [*REPLY[:3], ours("because of 17")]
    assert type(_raised(STYLES[style])) is theirs
    assert len(llm.submissions) == 1


def test_one_failing_choice_takes_its_siblings_with_it(provider: MinivllmProvider, llm: Any) -> None:
    llm.steps = lambda submission: [*REPLY[:3], errors.RequestFailedError("NaN logits")] if submission.choice == 2 else REPLY
    assert type(_raised(_completion, n=4)) is litellm.InternalServerError
    assert not llm.live
    assert not llm.finished


def test_one_refused_prompt_takes_its_siblings_with_it(provider: MinivllmProvider, llm: Any) -> None:
    submit = llm.submit

    def second_is_refused(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if llm.submissions:
            raise errors.QueueFullError("full")
        return submit(prompt, *args, **kwargs)

    llm.submit = second_is_refused
    with pytest.raises(litellm.RateLimitError):
        litellm.text_completion(model=MODEL, prompt=["a", "b", "c"])
    assert len(llm.submissions) == len(llm.aborted) == 1


class Reader:
    """Reads a stream to its end and keeps what it got, also when that is an exception."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def read(self, **kwargs: Any) -> None:
        for chunk in litellm.completion(model=MODEL, messages=MESSAGES, stream=True, **kwargs):
            self.texts.append(chunk.choices[0].delta.content)

    async def aread(self, **kwargs: Any) -> None:
        async for chunk in await litellm.acompletion(model=MODEL, messages=MESSAGES, stream=True, **kwargs):
            self.texts.append(chunk.choices[0].delta.content)


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize(("ours", "theirs"), CLASSES)
def test_a_failure_in_mid_stream_comes_after_what_was_delivered(
    provider: MinivllmProvider, llm: Any, how: str, ours: Any, theirs: Any
) -> None:
    """LiteLLM wraps 429 and 5xx that come from an iterator; the true class is inside. Nothing is delivered twice."""
    llm.steps = [*REPLY[:3], ours("because of 17")]
    reader = Reader()
    with pytest.raises(Exception) as caught:  # the class is looked at below
        asyncio.run(reader.aread(max_retries=2)) if how == "async" else reader.read(max_retries=2)
    error = getattr(caught.value, "original_exception", None) or caught.value
    assert type(error) is theirs
    assert "because of 17" in str(caught.value)
    assert reader.texts == list(REPLY[:3])
    assert len(llm.submissions) == 1


NO_ENDS = [[End("abort")], [*REPLY[:2], End("abort")], [*REPLY[:2], End("error")], [End("nonsense")]]


@pytest.mark.parametrize("steps", NO_ENDS, ids=str)
def test_an_end_that_is_none_is_never_reported_as_stop(provider: MinivllmProvider, llm: Any, steps: Any) -> None:
    llm.steps = steps
    reader = Reader()
    with pytest.raises(litellm.ServiceUnavailableError) as caught:  # MidStreamFallbackError is one
        reader.read()
    assert type(caught.value.original_exception) is litellm.InternalServerError  # type: ignore[attr-defined]
    assert reader.texts == [step for step in steps if isinstance(step, str)]
    with pytest.raises(litellm.InternalServerError):
        _completion()


def test_embeddings_of_a_model_that_gives_none(provider: MinivllmProvider, llm: Any) -> None:
    for _ in range(2):
        llm.refusals.append(errors.UnsupportedFeatureError("this model gives no embeddings"))
    with pytest.raises(litellm.UnsupportedParamsError, match="embeddings"):
        litellm.embedding(model=MODEL, input="text")
    with pytest.raises(litellm.UnsupportedParamsError, match="embeddings"):
        asyncio.run(litellm.aembedding(model=MODEL, input=["text"]))
    assert not llm.submissions
