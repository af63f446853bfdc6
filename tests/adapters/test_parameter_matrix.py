"""Every parameter of a chat, in every call style, is honoured, changes nothing or is refused by name; the page says which."""

import asyncio
import copy
import inspect
from typing import Any

import litellm
import openai
import pytest
from fake_llm import End
from parameter_matrix import OPENAI, OTHERS, PAGE, Row, table

from minivllm_adapters import parameters_table
from minivllm_adapters.handler import MinivllmProvider

MODEL = "minivllm/fake"
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well,"}]
MATRIX = OPENAI | OTHERS
# LiteLLM refuses these for a provider that it does not know, unless the call allows them.
ALLOWED = ["reasoning_effort", "thinking", "verbosity"]
STYLES = ["completion", "streaming", "acompletion", "astreaming"]


def _call(style: str, **params: Any) -> None:
    """One call, read to its end."""

    async def ask() -> None:
        answer: Any = await litellm.acompletion(**kwargs)
        if kwargs.get("stream"):
            async for _ in answer:
                pass

    allowed = [name for name in ALLOWED if name in params]
    kwargs: dict[str, Any] = copy.deepcopy({"model": MODEL, "messages": MESSAGES, **params})  # LiteLLM writes into values
    if "stream" not in params:
        kwargs["stream"] = "streaming" in style
    if allowed:
        kwargs["allowed_openai_params"] = allowed
    if style.startswith("a"):
        asyncio.run(ask())
    else:
        answer = litellm.completion(**kwargs)
        _ = list(answer) if kwargs["stream"] else answer


def _sent(llm: Any) -> Any:
    """What the engine was asked for, without what differs by chance."""
    last = llm.submissions[-1]
    return last.params, {name: value for name, value in last.options.items() if name != "timeout"}, last.prompt


@pytest.fixture(scope="module")
def usual() -> dict[tuple[str, str], Any]:
    """What the engine is asked for in each style without the parameter under test, but with what it needs beside it."""
    return {}


def _without(usual: dict[tuple[str, str], Any], llm: Any, style: str, row: Row) -> Any:
    """It is the same for all rows that need the same, and asked for once."""
    key = (style, repr(row.beside))
    if key not in usual:
        _call(style, **dict(row.beside))
        usual[key] = _sent(llm)
    return usual[key]


def _values(kind: str) -> list[Any]:
    return [
        pytest.param(name, row, value, id=f"{name}={value!r:.30}") for name, row in MATRIX.items() for value in getattr(row, kind)
    ]


IN_EVERY_STYLE = pytest.mark.parametrize("style", STYLES)


@IN_EVERY_STYLE
@pytest.mark.parametrize(("name", "row", "value"), _values("honoured"))
def test_honoured(
    provider: MinivllmProvider, llm: Any, usual: dict[Any, Any], style: str, name: str, row: Row, value: Any
) -> None:
    if name == "prompt_logprobs" and "streaming" in style:
        with pytest.raises(litellm.UnsupportedParamsError, match=name):
            _call(style, **{name: value})
        return
    llm.steps = ['<tool_call>{"name": "f", "arguments": {}}</tool_call>', End("stop")]
    before = _without(usual, llm, style, row)
    _call(style, **dict(row.beside), **{name: value})
    assert _sent(llm) != before


@IN_EVERY_STYLE
@pytest.mark.parametrize(
    ("name", "row", "value"), [*_values("neutral"), *[pytest.param(n, MATRIX[n], None, id=f"{n}=None") for n in MATRIX]]
)
def test_accepted_and_without_effect(
    provider: MinivllmProvider, llm: Any, usual: dict[Any, Any], style: str, name: str, row: Row, value: Any
) -> None:
    if name == "stream_options" and "streaming" not in style:
        pytest.skip("needs stream")
    before = _without(usual, llm, style, row)
    _call(style, **dict(row.beside), **{name: value})
    assert _sent(llm) == before


@IN_EVERY_STYLE
@pytest.mark.parametrize(("name", "row", "value"), _values("refused"))
def test_refused_by_name(provider: MinivllmProvider, llm: Any, style: str, name: str, row: Row, value: Any) -> None:
    with pytest.raises(litellm.BadRequestError) as caught:
        _call(style, **dict(row.beside), **{name: value})
    assert caught.value.status_code == 400
    assert parameters_table.ALIASES.get(name, name) in str(caught.value)
    assert not llm.submissions


def test_the_matrix_has_every_parameter() -> None:
    create = set(inspect.signature(openai.resources.chat.completions.Completions.create).parameters)
    transport = {"self", "messages", "model", "extra_headers", "extra_query", "extra_body", "timeout"}
    assert create - transport - OPENAI.keys() <= {"moderation", "prompt_cache_options"}, (
        "new in OpenAI's API: say what becomes of it"
    )
    ours = parameters_table.SUPPORTED | parameters_table.IGNORED.keys() | parameters_table.NEUTRAL_ONLY.keys()
    assert MATRIX.keys() == ours | {"stream", "stream_options"}


def test_the_page_has_the_matrix() -> None:
    assert table() in PAGE.read_text("utf-8"), "run python tests/support/parameter_matrix.py"
