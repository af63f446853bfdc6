"""What a request does to its logits, against definitions written out in plain Python; and that company changes nothing.

The definitions are vLLM's, in vLLM's order: allowed tokens, bad words, min_tokens, bias, repetition, frequency and presence
penalty; then temperature, min_p, top_k, top_p.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.errors import InvalidRequestError, RequestFailedError, UnsupportedFeatureError
from minivllm_plugin.runner.adjustments import adjust_logits
from minivllm_plugin.runner.sampler import sample, uniform
from minivllm_plugin.testing import HashedLogits, LogitsRunner, scripted_llm

VOCAB = 23
ENDS = (0, 1)
token_ids = st.integers(0, VOCAB - 1)
some_tokens = st.lists(token_ids, min_size=1, max_size=4)
requests = st.fixed_dictionaries(
    {},
    optional={
        "allowed_token_ids": st.lists(token_ids, min_size=3, max_size=12),
        "bad_words_token_ids": st.lists(some_tokens, max_size=5),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(st.integers(2, VOCAB - 1), max_size=2),
        "ignore_eos": st.booleans(),
        "logit_bias": st.dictionaries(token_ids, st.floats(-200, 200), max_size=4),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.1, 5),
    },
)
filters = st.fixed_dictionaries(
    {"temperature": st.floats(0.1, 3)},
    optional={"top_k": st.integers(-1, VOCAB), "top_p": st.floats(0.05, 1), "min_p": st.floats(0, 1)},
)


def make(prompt: list[int], completion: list[int], **params: Any) -> Sequence:
    seq = Sequence(prompt, sampling_params=SamplingParams(max_tokens=100, **params))
    for token in completion:
        seq.append_token(token)
    return seq


def defined(logits: list[float], prompt: list[int], completion: list[int], params: SamplingParams) -> list[float]:
    """The adjusted logits, one token at a time."""
    out = list(logits)
    for token in range(len(out)):
        if params.allowed_token_ids is not None and token not in params.allowed_token_ids:
            out[token] = -math.inf
        for word in params.bad_words_token_ids:
            before = list(word[:-1])
            if word[-1] == token and (completion[-len(before) :] if before else []) == before and len(completion) >= len(before):
                out[token] = -math.inf
        ends = set(params.stop_token_ids or ()) | (set() if params.ignore_eos else set(ENDS))
        if len(completion) < params.min_tokens and token in ends:
            out[token] = -math.inf
        out[token] += max(-100.0, min(100.0, (params.logit_bias or {}).get(token, 0.0)))
        if token in prompt or token in completion:
            penalty = params.repetition_penalty
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        out[token] -= params.frequency_penalty * completion.count(token)
        out[token] -= params.presence_penalty * (token in completion)
    return out


def distribution(logits: list[float], params: SamplingParams) -> list[float]:
    """The probabilities that are left after all filters, not normalised."""
    peak = max(logits)
    weights = [math.exp((value - peak) / params.temperature) for value in logits]
    total = sum(weights)
    chances = [weight / total for weight in weights]
    kept = [token for token in range(len(chances)) if chances[token] > 0 and chances[token] >= params.min_p * max(chances)]
    kept.sort(key=lambda token: -chances[token])
    kept = kept[: params.top_k] if params.top_k > 0 else kept
    mass = sum(chances[token] for token in kept)
    nucleus, before = [], 0.0
    for token in kept:
        if nucleus and before >= params.top_p * mass:
            break
        nucleus.append(token)
        before += chances[token]
    return [chances[token] if token in nucleus else 0.0 for token in range(len(chances))]


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


# --- in the engine ----------------------------------------------------------------------------------------------------


def completion_by_definition(prompt: list[int], params: SamplingParams) -> list[int]:
    """The greedy completion that a request must get, with no engine at all."""
    seq, logits_of = Sequence(prompt, sampling_params=params), HashedLogits(VOCAB)
    while seq.num_completion_tokens < (params.max_tokens or 0):
        adjusted = defined(list(logits_of(seq)), prompt, seq.completion_token_ids, params)
        seq.append_token(max(range(VOCAB), key=lambda token: adjusted[token]))
        ended = seq.last_token in (*params.stop_token_ids, *(() if params.ignore_eos else ENDS[:1]))  # type: ignore[misc]
        if ended and seq.num_completion_tokens >= params.min_tokens:
            break
    return seq.completion_token_ids


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    wanted=st.lists(requests, min_size=3, max_size=3),
    num_blocks=st.sampled_from([10, 12, 100]),
    budget=st.sampled_from([2, 5, 64]),
    cached=st.booleans(),
)
def test_company_preemption_and_chunks_change_nothing(
    wanted: list[dict[str, Any]], num_blocks: int, budget: int, cached: bool
) -> None:
    params = [
        SamplingParams(temperature=0.0, max_tokens=14, **{"ignore_eos": True, **one, "min_tokens": one.get("min_tokens", 0)})
        for one in wanted
    ]
    prompts = [[5, 6, 7, 8, 9, 2], [5, 6, 7, 8, 3], [4]]
    expected = [completion_by_definition(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
    llm, _ = scripted_llm(
        num_blocks=num_blocks,
        vocab_size=VOCAB,
        runner=LogitsRunner,
        end_token_ids=ENDS,
        options={"max_num_batched_tokens": budget, "max_num_sequences": min(budget, 3), "enable_prefix_caching": cached},
    )
    with llm:
        streams = [llm.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        for stream, tokens in zip(streams, expected, strict=True):
            try:
                assert stream.result().outputs[0].token_ids == tokens
            except RequestFailedError:  # its own parameters leave no token at some place
                assert stream.output.outputs[0].token_ids == tokens[: len(stream.output.outputs[0].token_ids)]


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    wanted=st.lists(st.tuples(requests, filters), min_size=3, max_size=3),
    num_blocks=st.sampled_from([10, 100]),
    budget=st.sampled_from([2, 64]),
    seed=st.integers(0, 2**64 - 1),
)
def test_a_seed_gives_the_same_tokens_under_all_parameters(
    wanted: list[tuple[dict[str, Any], dict[str, Any]]], num_blocks: int, budget: int, seed: int
) -> None:
    params = [SamplingParams(seed=seed, max_tokens=14, **{"ignore_eos": True, **one, **two}) for one, two in wanted]
    prompts = [[5, 6, 7, 8, 9, 2], [5, 6, 7, 8, 3], [4]]

    def run(blocks: int, tokens: int, together: bool) -> list[list[int]]:
        options = {"max_num_batched_tokens": tokens, "max_num_sequences": min(tokens, 3)}
        llm, _ = scripted_llm(num_blocks=blocks, vocab_size=VOCAB, runner=LogitsRunner, end_token_ids=ENDS, options=options)
        with llm:
            streams = []
            for prompt, one in zip(prompts, params, strict=True):
                streams.append(llm.submit(prompt, one))
                if not together:
                    wait_for(streams[-1])
            for stream in streams:
                wait_for(stream)
            return [stream.output.outputs[0].token_ids for stream in streams]

    assert run(num_blocks, budget, together=True) == run(100, 64, together=False)


def wait_for(stream: Any) -> None:
    """To its end, be it that its parameters leave no token at some place."""
    try:
        stream.result()
    except RequestFailedError:
        return


def test_a_nan_row_fails_alone_and_with_its_cause() -> None:
    bad = HashedLogits(VOCAB)

    def logits(seq: Sequence) -> list[float]:
        return [math.nan] * VOCAB if seq.request_id == "bad" and seq.num_completion_tokens == 3 else list(bad(seq))

    llm, _ = scripted_llm(vocab_size=VOCAB, runner=LogitsRunner, logits=logits)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, repetition_penalty=1.3, logprobs=1)
    with llm:
        expected = llm.generate([3, 4], params, use_tqdm=False)[0].outputs[0].token_ids
        failing, other = llm.submit([9], params, request_id="bad"), llm.submit([3, 4], params)
        with pytest.raises(RequestFailedError, match="not finite"):
            failing.result()
        assert len(failing.output.outputs[0].token_ids) == 3
        assert other.result().outputs[0].token_ids == expected


# --- with words -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM("smollm2-135m", max_model_len=512) as llm:
        yield llm


PROMPT = "The capital of France is"


@pytest.mark.model
def test_bad_words_do_not_come_alone_nor_after_a_space(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    plain = llm.generate(PROMPT, greedy, use_tqdm=False)[0].outputs[0].text
    assert " Paris" in plain
    for words in (["Paris"], [" Paris"], ["Paris.", "Paris,", "Paris"], ["capital of", "Paris"]):
        text = llm.generate(PROMPT, greedy.replace(bad_words=words), use_tqdm=False)[0].outputs[0].text
        assert not any(word.strip() in text for word in words), (words, text)
    no_breaks = llm.generate(PROMPT, greedy.replace(bad_words=["\n"], ignore_eos=True), use_tqdm=False)[0].outputs[0]
    newline = llm.tokenizer.encode("\n", add_special_tokens=False)[0]  # type: ignore[union-attr]
    assert newline not in no_breaks.token_ids
    assert " " in no_breaks.text


@pytest.mark.model
def test_the_real_model_obeys_every_parameter(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    tokens = [output.outputs[0].token_ids for output in llm.generate(
        [PROMPT] * 6,
        [
            greedy,
            greedy.replace(presence_penalty=2.0, frequency_penalty=2.0),
            greedy.replace(repetition_penalty=1e30),
            greedy.replace(allowed_token_ids=[100, 200, 300]),
            greedy.replace(logit_bias={"1234": 100}),
            greedy.replace(logit_bias={1234: 100}, presence_penalty=2.0, bad_words_token_ids=[[1234, 1234]]),
        ],
        use_tqdm=False,
    )]  # fmt: skip
    plain, penalised, never, allowed, biased, alternating = tokens
    assert len(set(never)) == 16
    assert not set(never) & set(llm.tokenizer.encode(PROMPT))  # type: ignore[union-attr]
    assert len(set(penalised)) >= len(set(plain))
    assert set(allowed) <= {100, 200, 300}
    assert biased == [1234] * 16
    assert 1234 in alternating
    assert all(pair != (1234, 1234) for pair in pairwise(alternating))
