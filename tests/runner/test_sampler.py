"""The sampler: filters against a plain reference, draws that depend on nothing but seed and position, rows on their own."""

import math
import random

import pytest
import torch

from minivllm_kernels import TokenDraw
from minivllm_kernels.reference import filter_probabilities
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.runner.sampler import sample, uniform
from minivllm_plugin.sampling_parameters import SamplingParams

VOCAB = 97


def sequence(completion: int = 0, **params: object) -> Sequence:
    seq = Sequence([1, 2, 3], sampling_params=SamplingParams(**params))  # type: ignore[arg-type]
    for _ in range(completion):
        seq.append_token(5)
    return seq


def random_logits(rows: int, seed: int = 0, scale: float = 4.0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def naive_filter(probabilities: list[float], params: TokenDraw) -> list[float]:
    """min_p, then top_k, then top_p over what is left, one token at a time."""
    kept = [p if p >= params.min_p * max(probabilities) else 0.0 for p in probabilities]
    order = sorted(range(len(kept)), key=lambda token: -kept[token])
    if 0 < params.top_k < len(kept):
        order = order[: params.top_k]
    total = sum(kept[token] for token in order)
    chosen, mass = [], 0.0
    for token in order:
        if chosen and mass >= params.top_p * total:
            break
        chosen.append(token)
        mass += kept[token]
    return [kept[token] if token in set(chosen) else 0.0 for token in range(len(kept))]


@pytest.mark.parametrize("seed", range(40))
def test_filters_equal_the_plain_reference(seed: int) -> None:
    rng = random.Random(seed)
    params = TokenDraw(
        0.0,
        top_k=rng.choice([0, 1, 2, 5, 50, VOCAB, VOCAB - 1]),
        top_p=rng.choice([1.0, 0.999, 0.9, 0.5, 0.1, 1e-6]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
    )
    probabilities = torch.softmax(random_logits(1, seed, scale=rng.choice([0.1, 1.0, 5.0, 30.0]))[0], dim=-1)
    expected = naive_filter(probabilities.tolist(), params)
    assert filter_probabilities(probabilities, params).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.5}, {"top_k": 3, "top_p": 0.6}])
def test_equal_probabilities_are_cut_at_the_lower_token_ids(params: dict[str, float]) -> None:
    kept = filter_probabilities(torch.full((8,), 0.125), TokenDraw(0.0, **params)).nonzero().squeeze(1).tolist()  # type: ignore[arg-type]
    assert kept == list(range(len(kept)))
    assert kept


def test_draws_follow_the_distribution() -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = probabilities.log()
    counts = [0] * 4
    draws = 4000
    for seed in range(draws):
        counts[sample(logits.unsqueeze(0).clone(), [sequence(seed=seed)], ())[0]] += 1
    for count, probability in zip(counts, probabilities.tolist(), strict=True):
        sigma = math.sqrt(draws * probability * (1 - probability))
        assert abs(count - draws * probability) < 5 * sigma


def test_uniform_is_in_range_and_depends_on_both_arguments() -> None:
    values = {uniform(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(100)}
    assert len(values) == 300
    assert all(0.0 <= value < 1.0 for value in values)


def test_a_seed_gives_the_same_tokens_in_any_company() -> None:
    logits = random_logits(3, seed=3, scale=1.0)
    for step in range(20):
        alone = sample(logits[1:2].clone(), [sequence(step, seed=42)], ())[0]
        others = [sequence(step, seed=7), sequence(step, seed=42), sequence(step, temperature=0.0, seed=42)]
        assert sample(logits.clone(), others, ())[1] == alone
        assert sample(logits[[1, 0]].clone(), [others[1], sequence(step)], ())[0] == alone


def test_requests_without_a_seed_differ_and_one_request_differs_from_step_to_step() -> None:
    flat = torch.zeros(1, VOCAB)
    assert len({sample(flat.clone(), [sequence()], ())[0] for _ in range(50)}) > 10
    assert len({sample(flat.clone(), [sequence(step, seed=1)], ())[0] for step in range(50)}) > 10


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-5, 1e-4, 1e-3])
def test_small_temperatures_are_the_argmax(dtype: torch.dtype, temperature: float) -> None:
    logits = torch.linspace(-60, 60, VOCAB).to(dtype).float()[torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))]
    tokens = sample(logits.repeat(4, 1), [sequence(temperature=temperature, seed=seed) for seed in range(4)], ())
    assert tokens == [int(logits.argmax())] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bad_row_fails_alone(temperature: float) -> None:
    logits = random_logits(6, seed=9)
    expected = sample(logits.clone(), [sequence(temperature=temperature, seed=row) for row in range(6)], ())
    logits[1, 4] = float("nan")
    logits[2] = float("-inf")
    logits[3, 0] = float("inf")
    tokens = sample(logits, [sequence(temperature=temperature, seed=row) for row in range(6)], ())
    assert tokens == [expected[0], FAILED_TOKEN, FAILED_TOKEN, FAILED_TOKEN, *expected[4:]]


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((1, VOCAB), float("-inf"))
    logits[0, [3, 50]] = 0.0
    assert {sample(logits.clone(), [sequence(seed=seed)], ())[0] for seed in range(60)} == {3, 50}


def test_min_tokens_holds_back_every_end_until_it_is_reached() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7], logits[0, 8], logits[0, 9], logits[0, 10] = 9.0, 8.0, 7.0, 6.0
    params = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": [9]}
    assert sample(logits.clone(), [sequence(0, **params)], (7, 8))[0] == 10
    assert sample(logits.clone(), [sequence(1, **params)], (7, 8))[0] == 10
    assert sample(logits.clone(), [sequence(2, **params)], (7, 8))[0] == 7


def test_ignored_eos_may_come_at_any_time() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 9.0
    assert sample(logits.clone(), [sequence(0, temperature=0.0, min_tokens=2, ignore_eos=True)], (7,))[0] == 7


def test_rows_have_their_own_filters() -> None:
    logits = random_logits(1, seed=5, scale=0.5).repeat(3, 1)
    for seed in range(30):
        tokens = sample(logits.clone(), [sequence(top_k=1, seed=seed), sequence(seed=seed), sequence(top_p=1e-9, seed=seed)], ())
        alone = sample(logits[1:2].clone(), [sequence(seed=seed)], ())[0]
        assert tokens == [int(logits[0].argmax()), alone, int(logits[0].argmax())]
