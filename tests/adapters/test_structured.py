"""Forms of answers: every way to ask for one arrives as one constraint of the engine; what cannot be had is a 400 at the door."""

import asyncio
import json
from typing import Any

import litellm
import pytest
from pydantic import BaseModel

from minivllm_adapters.handler import MinivllmProvider
from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.structured import StructuredOutputsParams

MODEL = "minivllm/fake"
MESSAGES = [{"role": "user", "content": "invent somebody"}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


class Person(BaseModel):
    name: str
    age: int


def _ask(**kwargs: Any) -> Any:
    return litellm.completion(model=MODEL, messages=MESSAGES, **kwargs)


def _named(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}


FORMS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, {"json_object": True}),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, {"json": SCHEMA}),
    ({"response_format": _named(SCHEMA)}, {"json": SCHEMA}),
    ({"response_format": _named(True)}, {"json": True}),
    ({"guided_json": SCHEMA}, {"json": SCHEMA}),
    ({"guided_json": json.dumps(SCHEMA)}, {"json": SCHEMA}),
    ({"guided_regex": "[0-9]+"}, {"regex": "[0-9]+"}),
    ({"guided_choice": ["yes", "no"]}, {"choice": ["yes", "no"]}),
    ({"guided_grammar": 'start: "a"'}, {"grammar": 'start: "a"'}),
    ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
    ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
    ({"structured_outputs": {"json": SCHEMA}}, {"json": SCHEMA}),
    ({"extra_body": {"guided_choice": ["yes", "no"]}}, {"choice": ["yes", "no"]}),
    ({"extra_body": {"structured_outputs": {"json_object": True}}}, {"json_object": True}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("given", "form"), FORMS, ids=str)
def test_a_form_arrives_at_the_engine(provider: MinivllmProvider, llm: Any, given: Any, form: Any, stream: bool) -> None:
    answer = _ask(**given, stream=stream)
    _ = list(answer) if stream else answer
    expected = None if form is None else StructuredOutputsParams(**form)
    assert llm.submissions[-1].params == llm.default_sampling_params().replace(structured_outputs=expected)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_pydantic_class_becomes_its_schema(provider: MinivllmProvider, llm: Any, asynchronous: bool) -> None:
    llm.steps = ['{"name": ', '"Ada", "age"', ": 36}"]
    kwargs: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "response_format": Person}
    answer: Any = asyncio.run(litellm.acompletion(**kwargs)) if asynchronous else litellm.completion(**kwargs)
    assert Person.model_validate_json(answer.choices[0].message.content) == Person(name="Ada", age=36)
    schema = json.loads(llm.submissions[-1].params.structured_outputs.json)
    assert schema["properties"].keys() == {"name", "age"}
    assert schema["required"] == ["name", "age"]


def test_a_class_that_comes_past_litellm_and_text_completions(provider: MinivllmProvider, llm: Any) -> None:
    provider.completion("fake", MESSAGES, optional_params={"guided_json": Person})
    expected = llm.submissions[-1].params.structured_outputs
    provider.completion("fake", MESSAGES, optional_params={"response_format": Person})
    assert llm.submissions[-1].params.structured_outputs == expected
    litellm.text_completion(model=MODEL, prompt="Answer:", guided_choice=["yes", "no"])
    assert llm.submissions[-1].params.structured_outputs == StructuredOutputsParams(choice=["yes", "no"])


def test_the_text_format_of_a_responses_call(provider: MinivllmProvider, llm: Any) -> None:
    form = {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}
    litellm.responses(model=MODEL, input="invent somebody", text={"format": form})  # type: ignore[arg-type]
    assert json.loads(llm.submissions[-1].params.structured_outputs.json)["properties"] == SCHEMA["properties"]


@pytest.mark.parametrize("ours", [InvalidRequestError, UnsupportedFeatureError])
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_the_engine_refuses_is_a_bad_request_from_the_call_itself(
    provider: MinivllmProvider, llm: Any, ours: Any, stream: bool
) -> None:
    llm.refusals = [ours("the JSON schema asks for what cannot be enforced: not"), ours("and asynchronously: not")]
    given: dict[str, Any] = {"response_format": _named({"not": {}}), "stream": stream}
    with pytest.raises(litellm.BadRequestError, match="not"):
        _ask(**given)
    with pytest.raises(litellm.BadRequestError, match="not"):
        asyncio.run(litellm.acompletion(model=MODEL, messages=MESSAGES, **given))
    assert not llm.live


def test_an_answer_of_a_fixed_form_holds_no_reasoning(provider: MinivllmProvider, llm: Any) -> None:
    """The prompt of some models opens the reasoning; a form has no place for its end, so all of the text is the answer."""
    llm.reasoning_format, llm.opens_reasoning = "think", True
    llm.steps = ['{"name": "Ada"}']
    for given in ({"response_format": {"type": "json_object"}}, {"guided_regex": ".*"}):
        message = _ask(**given).choices[0].message
        assert message.content == '{"name": "Ada"}'
        assert getattr(message, "reasoning_content", None) is None
        chunks = list(_ask(**given, stream=True))
        assert "".join(c.choices[0].delta.content or "" for c in chunks) == '{"name": "Ada"}'
    assert _ask().choices[0].message.reasoning_content == '{"name": "Ada"}'
