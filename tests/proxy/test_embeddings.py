"""Embeddings through the proxy, as OpenAI's client asks for them, and through LiteLLM itself."""

import base64
import struct
from typing import Any

import pytest

from minivllm_adapters.embeddings import plan_embedding
from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError

DIMENSIONS = 8  # of the scripted engine


def _expected(data: bytes) -> list[float]:
    counts = [sum(byte_id % DIMENSIONS == rest for byte_id in data) for rest in range(DIMENSIONS)]
    length = sum(count * count for count in counts) ** 0.5
    return [count / length for count in counts]


def test_vectors_come_in_order_and_are_counted(openai_client: Any) -> None:
    texts = ["one", "two and more", "three"]
    made = openai_client.embeddings.create(model="scripted", input=texts, encoding_format="float")
    assert [entry.index for entry in made.data] == [0, 1, 2]
    assert all(sum(value * value for value in entry.embedding) == pytest.approx(1, abs=1e-5) for entry in made.data)
    assert made.usage.prompt_tokens == made.usage.total_tokens == sum(map(len, texts))
    alone = openai_client.embeddings.create(model="scripted", input="two and more", encoding_format="float")
    assert alone.data[0].embedding == pytest.approx(made.data[1].embedding)


def test_encodings_agree(lax_openai_client: Any, server: Any) -> None:
    numbers = lax_openai_client.embeddings.create(model="scripted", input="one", encoding_format="float").data[0].embedding
    assert len(numbers) == DIMENSIONS
    assert lax_openai_client.embeddings.create(model="scripted", input="one").data[0].embedding == pytest.approx(
        numbers, abs=1e-6
    )
    status, body, _ = server.request("/v1/embeddings", {"model": "scripted", "input": "one", "encoding_format": "base64"})
    assert status == 200
    raw = base64.b64decode(body["data"][0]["embedding"])
    assert struct.unpack(f"<{DIMENSIONS}f", raw) == pytest.approx(numbers, abs=1e-6)


def test_dimensions_shorten_and_normalise(openai_client: Any) -> None:
    whole = openai_client.embeddings.create(model="scripted", input="a longer text", encoding_format="float").data[0].embedding
    short = openai_client.embeddings.create(model="scripted", input="a longer text", dimensions=3, encoding_format="float")
    length = sum(value * value for value in whole[:3]) ** 0.5
    assert short.data[0].embedding == pytest.approx([value / length for value in whole[:3]])


def test_token_ids_are_not_read_with_another_models_tokenizer(openai_client: Any) -> None:
    ids = [3, 3, 11, 8]
    expected = _expected(bytes(ids))
    for given in (ids, [ids, [1]]):
        made = openai_client.embeddings.create(model="scripted", input=given, encoding_format="float")
        assert made.data[0].embedding == pytest.approx(expected)
    assert made.usage.prompt_tokens == 5


@pytest.mark.parametrize(
    "options", [{"input": []}, {"input": ""}, {"input": "x", "dimensions": 9}, {"input": "x", "dimensions": 0}], ids=str
)
def test_bad_values_are_400(openai_client: Any, options: dict[str, Any]) -> None:
    import openai

    with pytest.raises(openai.BadRequestError):
        openai_client.embeddings.create(model="scripted", **options)


def _plan(given: object, **params: Any) -> Any:
    return plan_embedding(given, {"optional_params": params})


def test_what_a_call_may_say() -> None:
    plan = _plan(["a", [1, 2]], dimensions=2, encoding_format="base64", user="me", extra_body={"dimensions": 3, "priority": -1})
    assert (plan.prompts, plan.dimensions, plan.as_base64, plan.priority) == (("a", [1, 2]), 3, True, -1)
    assert _plan([1, 2]).prompts == ([1, 2],)
    assert _plan("a").as_base64 is False


@pytest.mark.parametrize(
    "given", [[], "", None, 3, [""], [[]], ["a", None], [True], ["a"] * 2049], ids=lambda given: str(given)[:20]
)
def test_other_inputs_are_refused(given: object) -> None:
    with pytest.raises(InvalidRequestError, match="input"):
        _plan(given)


def test_other_parameters_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedFeatureError, match="temperature"):
        _plan("a", temperature=0)
    with pytest.raises(InvalidRequestError, match="encoding_format"):
        _plan("a", encoding_format="int8")
    with pytest.raises(InvalidRequestError, match="extra_body"):
        _plan("a", extra_body=[1])
    with pytest.raises(InvalidRequestError, match="dimensions"):
        _plan("a", dimensions="3")
