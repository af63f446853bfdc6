"""Adjusted logits in the engine: completions worked out without one, whatever the company; and words on the real model."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_definitions import ENDS, VOCAB, defined, filters, requests

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.errors import RequestFailedError
from minivllm_plugin.testing import HashedLogits, LogitsRunner, RepeatingTokens, scripted_llm


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


@pytest.mark.parametrize("seed", range(5))
def test_guesses_change_nothing_in_a_mixed_batch(seed: int) -> None:
    """Half of these are guessed for, the others never; all of them stand in the same steps."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.6, "seed": seed, "top_k": 5},
        {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.05},
        {"temperature": 0.4, "seed": seed, "min_tokens": 60, "stop_token_ids": [7]},
    ]
    params = [SamplingParams(**{"max_tokens": 100, "ignore_eos": True, **kind}) for kind in kinds]
    prompts = [[5, 6, 7, seed], [5, 6, 7, 8], [seed + 2], [4, seed]]

    def run(num_speculative_tokens: int) -> tuple[list[Any], int]:
        llm, _ = scripted_llm(
            num_blocks=200,
            vocab_size=VOCAB,
            runner=LogitsRunner,
            logits=HashedLogits(VOCAB, RepeatingTokens(2**31)),
            end_token_ids=ENDS,
            options={"num_speculative_tokens": num_speculative_tokens},
        )
        with llm:
            streams = [llm.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
            outputs = [stream.result().outputs[0] for stream in streams]
            return [(one.token_ids, one.finish_reason, one.logprobs) for one in outputs], llm.snapshot().num_accepted_tokens

    expected, _ = run(0)
    found, num_accepted = run(7)
    assert found == expected
    assert num_accepted > 10


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
