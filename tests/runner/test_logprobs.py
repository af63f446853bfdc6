"""Log-probabilities: raw, with the chosen token always there, ranks that are right with ties; of prompts, equal to transformers'.

Trial C10.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from settled import settled_snapshot
from tiny_checkpoints import tiny_checkpoint

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.runner.sampler import sample
from minivllm_plugin.serving.logprobs import as_mapping
from minivllm_plugin.testing import HashedLogits, LogitsRunner, scripted_llm

VOCAB = 19


def defined(logits: list[float]) -> list[float]:
    """Log-softmax, one number at a time."""
    peak = max(logits)
    norm = peak + math.log(sum(math.exp(value - peak) for value in logits))
    return [value - norm for value in logits]


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=VOCAB, max_size=VOCAB), min_size=1, max_size=4),
    counts=st.lists(st.none() | st.integers(0, 20), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_values_ranks_and_alternatives(rows: list[list[float]], counts: list[int | None], seed: int) -> None:
    """Halves have many ties, so that ranks and the edge of the alternatives are hit."""
    options = {"temperature": 0.7, "top_p": 0.9, "logit_bias": {3: 5.0}, "presence_penalty": 1.0, "seed": seed}
    seqs = [Sequence([1, 2], sampling_params=SamplingParams(logprobs=count, **options)) for count in counts[: len(rows)]]  # type: ignore[arg-type]
    tokens = sample(torch.tensor(rows), seqs, ())
    for logits, count, seq, token in zip(rows, counts, seqs, tokens, strict=False):
        if count is None:
            assert seq.logprobs == []
            continue
        entry = seq.logprobs[0]
        expected = defined(logits)
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(expected[token], abs=1e-5)
        assert entry.rank == 1 + sum(value > logits[token] for value in logits)
        best = sorted(logits, reverse=True)[: min(count, VOCAB)]
        assert [logits[one] for one in entry.top_token_ids] == best
        assert entry.top_logprobs == pytest.approx([expected[one] for one in entry.top_token_ids], abs=1e-5)
        told = as_mapping(entry, None)
        assert next(iter(told)) == token
        assert set(told) == {token, *entry.top_token_ids}
        for one, logprob in told.items():
            assert logprob.rank == 1 + sum(value > logits[one] for value in logits)
            assert logprob.decoded_token is None


def one_entry(params: SamplingParams) -> dict[int, Any]:
    llm, _ = scripted_llm(vocab_size=4, runner=LogitsRunner, logits=lambda _: [9.0, 8.0, 7.0, 6.0], eos=3)
    with llm:
        output = llm.generate([1], params, use_tqdm=False)[0].outputs[0]
    assert output.logprobs is not None
    chosen = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    assert output.cumulative_logprob == pytest.approx(sum(chosen))
    return dict(output.logprobs[0])


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {"temperature": 0.1, "top_k": 1}, {"top_p": 0.1}])
def test_the_best_three(changes: dict[str, Any]) -> None:
    entry = one_entry(SamplingParams(logprobs=3, max_tokens=2, ignore_eos=True, **changes))
    assert {token: one.rank for token, one in entry.items()} == {0: 1, 1: 2, 2: 3}
    assert [one.logprob for one in entry.values()] == pytest.approx(defined([9, 8, 7, 6])[:3], abs=1e-5)


def test_an_unlikely_token_stands_first_with_its_own_rank() -> None:
    entry = one_entry(SamplingParams(logprobs=3, temperature=0.0, max_tokens=2, ignore_eos=True, allowed_token_ids=[3]))
    assert [(token, one.rank) for token, one in entry.items()] == [(3, 4), (0, 1), (1, 2), (2, 3)]
    assert entry[3].logprob == pytest.approx(defined([9, 8, 7, 6])[3], abs=1e-5)


@pytest.mark.parametrize("count", [0, True])
def test_the_chosen_token_alone(count: int) -> None:
    entry = one_entry(SamplingParams(logprobs=count, temperature=0.0, max_tokens=2))
    assert list(entry) == [0]


def test_logits_of_minus_infinity_and_neighbours() -> None:
    seqs = [Sequence([1], sampling_params=SamplingParams(temperature=0.0, logprobs=count)) for count in (3, None, 1)]
    logits = torch.tensor([[1.0, -math.inf, -math.inf], [0.0, 1.0, 2.0], [math.nan, 1.0, 2.0]])
    assert sample(logits, seqs, ()) == [0, 2, -1]
    assert seqs[0].logprobs[0].top_logprobs == (0.0, -math.inf, -math.inf)
    assert seqs[1].logprobs == seqs[2].logprobs == []  # not asked for; failed


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(num_blocks=st.sampled_from([9, 100]), budget=st.sampled_from([2, 5, 64]), streamed=st.booleans())
def test_company_preemption_and_chunks_change_no_value(num_blocks: int, budget: int, streamed: bool) -> None:
    params = [SamplingParams(seed=1, logprobs=count, max_tokens=10, ignore_eos=True) for count in (2, None, 0)]
    prompts = [[5, 6, 7, 8, 9], [5, 6, 7, 8, 3, 1], [4]]
    logits_of = HashedLogits(VOCAB)
    options = {"max_num_batched_tokens": budget, "max_num_sequences": min(budget, 3)}
    llm, _ = scripted_llm(num_blocks=num_blocks, vocab_size=VOCAB, runner=LogitsRunner, options=options)
    with llm:
        streams = [llm.submit(prompt, one) for prompt, one in zip(prompts, params, strict=True)]
        for stream, prompt, one in zip(streams, prompts, params, strict=True):
            told = [entry for delta in stream for entry in delta.logprobs or ()] if streamed else None
            output = stream.result().outputs[0]
            if one.logprobs is None:
                assert output.logprobs is None
                assert output.cumulative_logprob is None
                assert not told
                continue
            assert output.logprobs is not None
            assert told is None or told == output.logprobs
            assert len(output.logprobs) == len(output.token_ids) == 10
            seq = Sequence(prompt)
            for token, entry in zip(output.token_ids, output.logprobs, strict=True):
                expected = defined(list(logits_of(seq)))
                assert len(entry) in (max(1, one.logprobs), one.logprobs + 1)
                told_values = [one.logprob for one in entry.values()]
                assert told_values == pytest.approx([expected[key] for key in entry], abs=1e-4)
                seq.append_token(token)


# --- of prompts, on a model ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A random Llama of two layers on disk, and transformers' copy of it."""
    return tiny_checkpoint(tmp_path_factory.mktemp("prompt-logprobs"), "Llama")


PROMPTS = [[5, 9, 11, 3, 60, 7, 7, 20, 31], [5, 9, 11, 3, 60, 7, 7, 8], [44], [1, 2], list(range(40, 70))]


def by_transformers(reference: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return torch.log_softmax(reference(torch.tensor([tokens])).logits[0].float(), dim=-1)


@pytest.mark.parametrize("kernels", ["reference", None])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 3, "max_num_sequences": 3},
        {"num_blocks": 14, "max_num_batched_tokens": 16, "max_num_sequences": 4},
        {"enable_chunked_prefill": False},
    ],
)
def test_prompts_are_scored_as_transformers_does(
    tiny: tuple[Path, Any], options: dict[str, Any], kernels: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels is not None:
        monkeypatch.setenv("MINIVLLM_KERNELS", kernels)
    directory, reference = tiny
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, prompt_logprobs=3, logprobs=2)
    with LLM(str(directory), dtype="float32", **{"num_blocks": 64, "block_size": 4, **options}) as llm:
        # The prefix cache is warm then, and must not be read.
        llm.generate(PROMPTS, params.replace(prompt_logprobs=None), use_tqdm=False)
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            prompt, completion = output.prompt_token_ids, output.outputs[0]
            assert output.num_cached_tokens == 0
            expected = by_transformers(reference, prompt + completion.token_ids)
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(prompt)
            assert output.prompt_logprobs[0] is None
            for place, entry in enumerate(output.prompt_logprobs[1:]):
                check(entry, expected[place], prompt[place + 1], 3)
            for place, entry in enumerate(completion.logprobs or (), len(prompt) - 1):
                check(entry, expected[place], (prompt + completion.token_ids)[place + 1], 2)
        assert "num_blocks" not in options or settled_snapshot(llm).num_preemptions > 0


def check(entry: Any, expected: torch.Tensor, token: int, count: int) -> None:
    assert next(iter(entry)) == token
    assert set(entry) == {token, *expected.topk(count).indices.tolist()}
    for one, logprob in entry.items():
        assert logprob.logprob == pytest.approx(float(expected[one]), abs=2e-4)
        assert logprob.rank == 1 + int((expected > expected[one]).sum())


def test_a_prompt_is_scored_once_for_all_choices(tiny: tuple[Path, Any]) -> None:
    directory, reference = tiny
    params = SamplingParams(seed=3, max_tokens=4, ignore_eos=True, prompt_logprobs=0, n=3)
    with LLM(str(directory), dtype="float32", num_blocks=64, block_size=4) as llm:
        output = llm.generate(PROMPTS[0], params, use_tqdm=False)[0]
    expected = by_transformers(reference, PROMPTS[0])
    assert output.prompt_logprobs is not None
    assert [entry and next(iter(entry)) for entry in output.prompt_logprobs] == [None, *PROMPTS[0][1:]]
    for place, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry is not None
        assert entry[PROMPTS[0][place + 1]].logprob == pytest.approx(float(expected[place, PROMPTS[0][place + 1]]), abs=2e-4)


@pytest.fixture(scope="module")
def real(smollm2_gguf: Path) -> Iterator[LLM]:
    with LLM("smollm2-135m", dtype="float32", max_model_len=256, max_num_batched_tokens=16, max_num_sequences=8) as llm:
        yield llm


@pytest.mark.model
def test_the_real_model_scores_its_own_words(real: LLM) -> None:
    """Scored as a prompt, a completion has the values that it had when it was made; its tokens carry their own text."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
    made = real.generate("The capital of France is", params, use_tqdm=False)[0]
    whole = [*made.prompt_token_ids, *made.outputs[0].token_ids]
    scored = real.generate(whole, params.replace(max_tokens=1, prompt_logprobs=2), use_tqdm=False)[0].prompt_logprobs
    assert scored is not None
    assert made.outputs[0].logprobs is not None
    for before, after in zip(made.outputs[0].logprobs, scored[len(made.prompt_token_ids) :], strict=True):
        assert after is not None
        assert list(before) == list(after)
        assert [one.logprob for one in after.values()] == pytest.approx([one.logprob for one in before.values()], abs=1e-3)
        assert all(one.decoded_token == real.tokenizer.decode([token]) for token, one in after.items())  # type: ignore[union-attr]


@pytest.mark.model
def test_a_stop_string_cuts_tokens_and_values_together(real: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=30, logprobs=0, stop=["Paris"])
    for stream in (False, True):
        if stream:
            deltas = list(real.stream("The capital of France is", params))
            tokens = [token for delta in deltas for token in delta.token_ids]
            entries = [entry for delta in deltas for entry in delta.logprobs or ()]
        else:
            output = real.generate("The capital of France is", params, use_tqdm=False)[0].outputs[0]
            tokens, entries = output.token_ids, output.logprobs or []
            assert output.stop_reason == "Paris"
        assert [next(iter(entry)) for entry in entries] == tokens
