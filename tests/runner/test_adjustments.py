"""What a request does to its logits, against definitions written out in plain Python; and what is refused."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_definitions import ENDS, VOCAB, defined, distribution, filters, requests, some_tokens, token_ids

from minivllm_plugin import SamplingParams
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.errors import InvalidRequestError, UnsupportedFeatureError
from minivllm_plugin.runner.adjustments import adjust_logits
from minivllm_plugin.runner.sampler import sample, uniform
from minivllm_plugin.testing import scripted_llm


def make(prompt: list[int], completion: list[int], **params: Any) -> Sequence:
    seq = Sequence(prompt, sampling_params=SamplingParams(max_tokens=100, **params))
    for token in completion:
        seq.append_token(token)
    return seq


def raw(seed: int, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 10_000), prompt=some_tokens, completion=st.lists(token_ids, max_size=6), wanted=requests)
def test_logits_are_adjusted_as_defined(seed: int, prompt: list[int], completion: list[int], wanted: dict[str, Any]) -> None:
    seq = make(prompt, completion, **wanted)
    logits = torch.stack([raw(seed), raw(seed + 1)])
    neighbour = make([1], [2], temperature=0.0)
    adjust_logits(logits, [seq, neighbour], ENDS)
    expected = defined(raw(seed).tolist(), prompt, completion, seq.sampling_params)
    assert logits[0].tolist() == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert torch.equal(logits[1], raw(seed + 1))  # who asks for nothing is not touched


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    prompt=some_tokens,
    completion=st.lists(token_ids, max_size=5),
    wanted=requests,
    filtered=filters,
)
def test_a_draw_falls_where_the_definition_puts_it(
    seed: int, prompt: list[int], completion: list[int], wanted: dict[str, Any], filtered: dict[str, Any]
) -> None:
    seq = make(prompt, completion, seed=seed, **wanted, **filtered)
    adjusted = defined(raw(seed).tolist(), prompt, completion, seq.sampling_params)
    token = sample(raw(seed).unsqueeze(0), [seq], ENDS)[0]
    if max(adjusted) == -math.inf:
        assert token == FAILED_TOKEN
        return
    # Whatever stands at the very edge of a filter may fall to either side in float32.
    allowed = []
    for nudge in (-1e-5, 0.0, 1e-5):
        params = seq.sampling_params
        nudged = params.replace(top_p=min(1.0, params.top_p + nudge), min_p=min(1.0, max(0.0, params.min_p + nudge)))
        chances = distribution(adjusted, nudged)
        below = [sum(chances[:place]) for place in range(VOCAB + 1)]
        target = uniform(seed, len(completion)) * below[-1]
        allowed.append(below[token] - 1e-5 <= target <= below[token + 1] + 1e-5 and chances[token] > 0)
    assert any(allowed)


@pytest.mark.parametrize("penalty", [1e-300, 1e-45, 1e-39, 1e39, 1e300])
def test_penalties_beyond_float32_are_absolute_but_no_failure(penalty: float) -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0, 1.0]])
    token = sample(logits, [make([0, 1, 2], [], repetition_penalty=penalty, temperature=0.0)], ())[0]
    assert token == (0 if penalty < 1 else 3)
    assert bool(torch.isfinite(logits).all())


def test_the_order_of_the_steps_shows() -> None:
    params = SamplingParams(
        temperature=0.0, logit_bias={3: 100, 5: 4}, allowed_token_ids=[4, 5], repetition_penalty=2.0, max_tokens=9
    )
    logits = torch.zeros(1, VOCAB)
    logits[0, 4] = 1.5
    adjust_logits(logits, [Sequence([5], sampling_params=params)], ENDS)
    assert logits[0, 3] == -math.inf  # a bias does not bring back what is not allowed
    assert (logits[0, 4], logits[0, 5]) == (1.5, 2.0)  # the penalty divides what the bias has raised
    params = params.replace(allowed_token_ids=None, logit_bias={0: 100}, min_tokens=1)
    logits = torch.zeros(1, VOCAB)
    adjust_logits(logits, [Sequence([5], sampling_params=params)], ENDS)
    assert logits[0, 0] == logits[0, 1] == -math.inf


def test_tokens_are_counted_along_and_once() -> None:
    seq = make([1], [], frequency_penalty=1.0)
    for place in range(5):
        for _ in range(2):  # asked twice for the same token, it counts it once
            logits = torch.zeros(1, VOCAB)
            adjust_logits(logits, [seq], ENDS)
            assert logits[0, 7] == -float(place)
        seq.append_token(7)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty=2.1 is outside [-2, 2]"),
        ({"frequency_penalty": -3}, "frequency_penalty=-3 is outside"),
        ({"repetition_penalty": 0}, "repetition_penalty=0 is outside (0, inf]"),
        ({"repetition_penalty": math.nan}, "finite number"),
        ({"logit_bias": [1]}, "dictionary"),
        ({"logit_bias": {"x": 1}}, "'x'"),
        ({"logit_bias": {-1: 1}}, "-1"),
        ({"logit_bias": {"²": 1}}, "²"),
        ({"logit_bias": {True: 1}}, "True"),
        ({"logit_bias": {3: "much"}}, "'much'"),
        ({"logit_bias": {3: math.inf}}, "inf"),
        ({"bad_words": "word"}, "list of strings"),
        ({"bad_words": ["ok", ""]}, "non-empty"),
        ({"bad_words": ["a"] * 1025}, "at most 1024"),
        ({"bad_words_token_ids": [[]]}, "no empty list"),
        ({"bad_words_token_ids": [1]}, "bad_words_token_ids"),
        ({"allowed_token_ids": []}, "leave it out"),
        ({"allowed_token_ids": [1.5]}, "1.5"),
        ({"allowed_token_ids": "12"}, "list of token ids"),
        ({"min_tokens": 5, "max_tokens": 4}, "raise max_tokens"),
        ({"n": 0}, "n=0"),
        ({"n": 129}, "between 1 and 128"),
        ({"logprobs": 21}, "between 0 and 20"),
        ({"prompt_logprobs": -1}, "prompt_logprobs=-1"),
        ({"structured_outputs": {"json": {}}}, "StructuredOutputsParams"),
    ],
)
def test_errors_name_the_value_and_the_limit(params: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**params)
    assert words in str(caught.value)
    assert next(iter(params)).split("_token_ids")[0] in str(caught.value)


@pytest.mark.parametrize("name", ["logit_bias", "allowed_token_ids", "bad_words_token_ids", "stop_token_ids"])
def test_tokens_beyond_the_vocabulary_are_refused_before_they_are_queued(name: str) -> None:
    value: Any = {"logit_bias": {VOCAB: 1.0}, "bad_words_token_ids": [[1, VOCAB]]}.get(name, [VOCAB])
    llm, runner = scripted_llm(vocab_size=VOCAB)
    with llm, pytest.raises(InvalidRequestError, match=rf"{name}.*{VOCAB}.*0\.\.{VOCAB - 1}"):
        llm.submit([1], SamplingParams(**{name: value}))
    assert runner.num_calls == 0


def test_bias_takes_digits_and_is_cut() -> None:
    params = SamplingParams(logit_bias={"7": 250, 8: -1000, "009": 1})
    assert params.logit_bias == {7: 100.0, 8: -100.0, 9: 1.0}
    assert params.replace(seed=1).logit_bias == params.logit_bias
    assert SamplingParams(logit_bias={}).logit_bias is None
    assert not SamplingParams(logit_bias={}).adjusts_logits


def test_bad_words_need_a_tokenizer() -> None:
    llm, _ = scripted_llm()
    with llm, pytest.raises(UnsupportedFeatureError, match="bad_words_token_ids"):
        llm.submit([1], SamplingParams(bad_words=["x"]))
