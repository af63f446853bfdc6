"""Constrained requests in the engine: where they end, and that company, preemption and chunks change nothing (trial C11)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from settled import settled_snapshot

from minivllm_plugin import SamplingParams
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.errors import RequestFailedError
from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.structured import StructuredOutputsParams
from minivllm_plugin.structured.compiler import GrammarCompiler
from minivllm_plugin.testing import HashedLogits

VOCABULARY = 300
SMALL = {"type": "integer", "minimum": -99, "maximum": 99}
OBJECT = {"type": "object", "properties": {"a": SMALL}, "required": ["a"], "additionalProperties": False}
GREEDY = SamplingParams(temperature=0.0, max_tokens=120)


def under(schema: Any, **changes: Any) -> SamplingParams:
    return GREEDY.replace(structured_outputs=StructuredOutputsParams(json=schema), **changes)


@pytest.fixture
def preferring(byte_tokenizer: Tokenizer) -> Callable[..., Callable[[Sequence], list[float]]]:
    """``preferring("</s>", " ", "}")``: logits with these first, in this order, and everything else in a hashed order below."""

    def make(*texts: str) -> Callable[[Sequence], list[float]]:
        hashed = HashedLogits(VOCABULARY)
        ends = dict(zip(("</s>", "<|im_end|>"), byte_tokenizer.eos_token_ids, strict=True))

        def logits(seq: Sequence) -> list[float]:
            values = list(hashed(seq))
            for place, text in enumerate(texts):
                token = ends[text] if text in ends else byte_tokenizer.encode(text, add_special_tokens=False)[0]
                values[token] = 100.0 - place
            return values

        return logits

    return make


@pytest.mark.parametrize("schema", [OBJECT, {"type": "boolean"}])
@pytest.mark.parametrize("end", ["</s>", "<|im_end|>"])
@pytest.mark.parametrize("changes", [{}, {"min_tokens": 40}, {"ignore_eos": True}, {"min_tokens": 40, "ignore_eos": True}])
def test_it_ends_right_after_its_value(engines: Any, preferring: Any, schema: Any, end: str, changes: dict[str, Any]) -> None:
    llm, _ = engines(preferring(end, " ", "}"))
    output = llm.generate([5, 6], under(schema, **changes), use_tqdm=False)[0].outputs[0]
    value = json.loads(output.text)
    assert isinstance(value, bool if schema != OBJECT else dict)
    assert output.finish_reason == "stop"
    assert output.stop_reason is None
    assert output.text == output.text.strip()
    assert "  " * 9 not in output.text  # sixteen blanks between two tokens, then it has to go on
    assert sum(token in llm.tokenizer.eos_token_ids for token in output.token_ids) == 1


@pytest.mark.parametrize("max_tokens", [1, 3])
def test_too_few_tokens_are_a_matter_of_length(engines: Any, preferring: Any, max_tokens: int) -> None:
    llm, _ = engines(preferring("</s>", "<|im_end|>"))
    output = llm.generate([5, 6], under(OBJECT, max_tokens=max_tokens), use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "length"
    assert len(output.token_ids) == max_tokens
    with pytest.raises(ValueError):
        json.loads(output.text)


def test_a_neighbour_without_a_constraint_is_untouched(engines: Any) -> None:
    llm, _ = engines()
    free = [GREEDY.replace(max_tokens=30, ignore_eos=True), SamplingParams(seed=3, max_tokens=30, ignore_eos=True, top_p=0.9)]
    alone = [llm.generate([7, 8, 9], params, use_tqdm=False)[0].outputs[0].token_ids for params in free]
    params = [free[0], under(OBJECT), free[1], under({"type": "boolean"})]
    together = llm.generate([[7, 8, 9], [1], [7, 8, 9], [2]], params, use_tqdm=False)
    assert [together[0].outputs[0].token_ids, together[2].outputs[0].token_ids] == alone


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_blocks=st.sampled_from([12, 14, 18, 400]),
    budget=st.sampled_from([1, 3, 5, 64]),
    cached=st.booleans(),
    sampled=st.booleans(),
)
def test_company_preemption_and_chunks_change_nothing(
    engines: Any, num_blocks: int, budget: int, cached: bool, sampled: bool
) -> None:
    items = {"type": "array", "items": {"enum": [1, "two"]}, "minItems": 3, "maxItems": 4}
    kinds = [OBJECT, items, {"type": "string", "pattern": "^[a-f]{12}$"}]
    params = [under(kind, temperature=1.0 if sampled else 0.0, seed=11, max_tokens=30) for kind in kinds]
    prompts = [[1, 2, 3, 4, 5], [9], [1, 2, 3, 4, 6, 7, 8]]
    alone, _ = engines()
    expected = [alone.generate(p, q, use_tqdm=False)[0].outputs[0] for p, q in zip(prompts, params, strict=True)]
    llm, _ = engines(
        num_blocks=num_blocks, max_num_batched_tokens=budget, max_num_sequences=min(budget, 3), enable_prefix_caching=cached
    )
    free = [SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)] * 2
    outputs = llm.generate([*prompts, [3, 3], [4]], [*params, *free], use_tqdm=False)
    assert [output.outputs[0] for output in outputs[:3]] == expected
    if num_blocks == 12 and budget >= 5:
        assert settled_snapshot(llm).num_preemptions > 0


def test_a_constraint_and_a_mask_that_leave_nothing_fail_their_request_alone(engines: Any) -> None:
    llm, _ = engines()
    stream = llm.submit([1], under(OBJECT, allowed_token_ids=[3, 4]))
    other = llm.submit([2], GREEDY)
    with pytest.raises(RequestFailedError, match="left no token that may be chosen"):
        stream.result()
    assert other.result().outputs[0].token_ids


def test_bias_and_penalties_cannot_break_it(engines: Any) -> None:
    llm, _ = engines()
    ends = dict.fromkeys(llm.tokenizer.eos_token_ids, 100)
    params = under(OBJECT, logit_bias=ends, repetition_penalty=1.7, presence_penalty=2.0)
    output = llm.generate([1, 2], params, use_tqdm=False)[0].outputs[0]
    assert output.finish_reason == "stop"
    assert set(json.loads(output.text)) == {"a"}


def test_every_choice_of_one_prompt_has_a_matcher_of_its_own(engines: Any) -> None:
    llm, _ = engines()
    params = under({"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}, n=4, temperature=1.0, seed=5)
    outputs = llm.generate([1, 2, 3, 4, 5], params, use_tqdm=False)[0].outputs
    assert all(len(json.loads(output.text)) == 3 and output.finish_reason == "stop" for output in outputs)
    assert len({output.text for output in outputs}) > 1


def test_raw_logprobs_are_those_before_the_mask(engines: Any, preferring: Any) -> None:
    llm, _ = engines(preferring("</s>", "<|im_end|>", "x"))
    output = llm.generate([1], under({"type": "boolean"}, logprobs=2), use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    first = output.logprobs[0]
    assert set(first) == {output.token_ids[0], *llm.tokenizer.eos_token_ids}
    assert first[output.token_ids[0]].rank > 3
    assert all(entry.logprob <= 0 for entry in first.values())


def test_an_end_token_that_is_ordinary_text_cannot_cut_a_string(tmp_path: Path) -> None:
    """Some models end with a token that is not special: its text is fine inside of a string, the token is not."""
    import toy_tokenizers

    backend = toy_tokenizers.byte_per_token()
    backend.add_tokens(["<end>"])
    plain_end = backend.token_to_id("<end>")
    ends = {"eos_token_id": [plain_end, backend.token_to_id("</s>")]}
    tokenizer = Tokenizer.load(toy_tokenizers.save(backend, tmp_path, {"eos_token": "</s>"}, generation_config=ends))
    assert plain_end in tokenizer.eos_token_ids
    matcher = GrammarCompiler(tokenizer, 300).compile(StructuredOutputsParams(json={"type": "string"})).new_matcher()
    letters = [backend.token_to_id(letter) for letter in '"<end>']
    assert matcher.validate_tokens(letters) == len(letters)
    assert matcher.validate_tokens([letters[0], plain_end]) == 1
    assert matcher.consume_tokens([letters[0], letters[0]])
    allowed = numpy.unpackbits(numpy.frombuffer(matcher.compute_bitmask(), numpy.uint8), bitorder="little")
    assert set(numpy.flatnonzero(allowed).tolist()) == set(tokenizer.eos_token_ids)
