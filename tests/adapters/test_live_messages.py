"""Messages through LiteLLM as the real chat renderer sees them: what a template gets, and what is refused by name."""

import json
from typing import Any

import litellm
import pytest
from live_engine import Live

MODEL = "minivllm/live"
USER = {"role": "user", "content": "hi"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


def _prompt(live: Live, messages: list[Any], **params: Any) -> str:
    """The text that the model gets to continue."""
    submitted: list[list[int]] = []
    live.get_llm("live")
    submit = live.llm._service.submit
    live.llm._service.submit = lambda request: (submitted.append(request.token_ids), submit(request))[1]  # type: ignore[method-assign]
    try:
        litellm.completion(model=MODEL, messages=messages, max_tokens=1, **params)
    finally:
        live.llm._service.submit = submit  # type: ignore[method-assign]
    return live.tokenizer.decode(submitted[0])


ACCEPTED: list[tuple[list[Any], str]] = [
    ([{"role": "developer", "content": "Be brief."}, USER], "system: Be brief.\nuser: hi\nassistant: "),
    (
        [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}],
        "user: one\ntwo\nassistant: ",
    ),
    ([{"role": "user", "content": "hi", "name": "ada"}], "user: hi\nassistant: "),
    ([USER, {"role": "assistant", "content": None}, USER], "user: hi\nassistant: \nuser: hi\nassistant: "),
    ([USER, {"role": "assistant"}, USER], "user: hi\nassistant: \nuser: hi\nassistant: "),
    ([USER, litellm.Message(role="assistant", content="yes"), USER], "user: hi\nassistant: yes\nuser: hi\nassistant: "),
]


@pytest.mark.parametrize(("messages", "text"), ACCEPTED, ids=str)
def test_what_a_template_gets(live: Live, messages: Any, text: str) -> None:
    assert _prompt(live, messages) == text


def test_an_answer_that_was_begun(live: Live) -> None:
    begun = [USER, {"role": "assistant", "content": "The answer"}]
    assert _prompt(live, begun, continue_final_message=True) == "user: hi\nassistant: The answer"
    begun[-1]["prefix"] = True  # type: ignore[assignment]
    assert _prompt(live, begun) == "user: hi\nassistant: The answer"


@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}, "", None], ids=str)
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "tools"])
def test_calls_and_results_of_the_history(live: Live, arguments: Any, tools: Any) -> None:
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    text = _prompt(live, [USER, {"role": "assistant", "content": None, "tool_calls": [call]}, RESULT], tools=tools)
    expected = {"city": "Paris"} if arguments else {}
    assert f"<tool_call>\n{json.dumps({'name': 'weather', 'arguments': expected})}\n</tool_call>" in text
    assert "<tool_response>\n18 degrees\n</tool_response>" in text
    assert ("# Tools" in text) == (tools is not None)


def test_tools_that_may_not_be_called_are_not_described(live: Live) -> None:
    assert "# Tools" not in _prompt(live, [USER], tools=[TOOL], tool_choice="none")


def _with(part: dict[str, Any]) -> list[Any]:
    return [{"role": "user", "content": [{"type": "text", "text": "look:"}, part]}]


def _after_call(arguments: Any) -> list[Any]:
    call = {**CALL, "function": {"name": "weather", "arguments": arguments}}
    return [USER, {"role": "assistant", "tool_calls": [call]}, RESULT]


REFUSED: list[tuple[list[Any], type[Exception], str]] = [
    (_with({"type": "image_url", "image_url": {"url": "data:,"}}), litellm.UnsupportedParamsError, "image"),
    (_with({"type": "input_audio", "input_audio": {}}), litellm.UnsupportedParamsError, "audio"),
    (_with({"type": "file", "file": {}}), litellm.UnsupportedParamsError, "file"),
    (_with({"type": "video_url"}), litellm.UnsupportedParamsError, "video"),
    ([{"role": "user"}], litellm.BadRequestError, "content"),
    ([{"role": "alien", "content": "x"}], litellm.BadRequestError, "alien"),
    *((_after_call(broken), litellm.BadRequestError, "arguments") for broken in ('{"city": ', "[1]", "not JSON", 7)),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("messages", "error", "name"), REFUSED, ids=str)
def test_what_is_refused_is_refused_by_name_and_never_queued(
    live: Live, messages: Any, error: type[Exception], name: str, stream: bool
) -> None:
    with pytest.raises(error, match=name) as caught:
        litellm.completion(model=MODEL, messages=messages, stream=stream)
    assert caught.value.status_code == 400  # type: ignore[attr-defined]
    assert live.runner.num_calls == 0
    assert live.llm.snapshot().num_waiting == 0
