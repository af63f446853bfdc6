"""Results of a sequence are the same bits alone, in any batch, in any pieces, by any number of threads, after any history."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from cpu_models import (
    WEIGHT_AND_CACHE_KINDS,
    WEIGHT_KINDS,
    CpuDriver,
    Request,
    build_module,
    model_config,
    need_cpu_kernels,
    random_tokens,
)
from torch import Tensor

from minivllm_kernels.cpu.decoder import DecoderWeights
from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.runner.cpu_weights import pack_module

LENGTHS = (1, 16, 33, 127, 129, 131, 300)
POISON = 100  # a token whose embedding is NaN: whoever computes it leaves NaN in every buffer
PAIRS = pytest.mark.parametrize(("weights", "cache"), WEIGHT_AND_CACHE_KINDS, ids=map("-".join, WEIGHT_AND_CACHE_KINDS))


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    need_cpu_kernels()


Case = tuple[ModelConfig, dict[str, DecoderWeights], dict[int, list[int]]]


def make_case(architecture: str, **fields: Any) -> Case:
    """Weights of every kind and a sequence of each length; the last token of the vocabulary poisons."""
    config = model_config(architecture, **fields)
    module = build_module(config)
    module.model.embed_tokens.weight[POISON] = torch.nan
    tokens = {length: [token % POISON for token in random_tokens(length, config, seed=length)] for length in LENGTHS}
    return config, {kind: pack_module(module, kind) for kind in WEIGHT_KINDS}, tokens


@pytest.fixture(scope="module")
def case() -> Case:
    return make_case("Qwen3", num_attention_heads=9, num_key_value_heads=3, head_dim=64, hidden_size=160)


def driver_of(case: Case, weights: str, cache: str, **options: Any) -> CpuDriver:
    return CpuDriver(case[0], case[1][weights], cache_kind=cache, **options)


def clean(logits: Tensor) -> Tensor:
    """Without the column of the poisonous token, whose logit is NaN in every row (tied embeddings)."""
    return logits[:, :POISON]


def alone(case: Case, weights: str, cache: str, **options: Any) -> dict[int, Tensor]:
    driver = driver_of(case, weights, cache, **options)
    logits = {length: clean(driver.run(tokens)) for length, tokens in case[2].items()}
    assert all(torch.isfinite(each).all() for each in logits.values())
    return logits


@PAIRS
def test_decoded_token_by_token(case: Case, weights: str, cache: str) -> None:
    expected = alone(case, weights, cache)
    driver = driver_of(case, weights, cache)
    for length in (129, 300):
        assert torch.equal(clean(driver.run(case[2][length], [1] * length)), expected[length])


@PAIRS
def test_any_threads(case: Case, weights: str, cache: str) -> None:
    expected = alone(case, weights, cache, threads=1)
    for threads in (2, 3, 5):
        assert all(
            torch.equal(logits, expected[length]) for length, logits in alone(case, weights, cache, threads=threads).items()
        )


@PAIRS
def test_any_company_any_cuts_any_history(case: Case, weights: str, cache: str) -> None:
    """Three rounds of everybody at once in random pieces, decodes beside chunks, blocks reused, poison in between."""
    expected = alone(case, weights, cache)
    rng = random.Random(f"{weights}/{cache}")
    driver = driver_of(case, weights, cache, threads=2, num_blocks=80)
    for _ in range(3):
        poison_the_buffers(driver, rng)
        got = in_random_pieces(driver, case[2], rng)
        for length, logits in got.items():
            assert torch.equal(clean(logits), expected[length]), length


@pytest.mark.parametrize(("weights", "cache"), [("float32", "float32"), ("int8", "bfloat16"), ("int4", "int8")])
def test_groups_of_heads_that_strips_and_tiles_do_not_divide(weights: str, cache: str) -> None:
    """Seven query heads a KV head, head size 80, every bias: rows are looked at six at a time, prompts in tiles of 13 tokens."""
    sizes = {"num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 80, "hidden_size": 96}
    case = make_case("Llama", attention_bias=True, mlp_bias=True, tie_word_embeddings=False, **sizes)
    expected = alone(case, weights, cache)
    driver = driver_of(case, weights, cache)
    rng = random.Random(7)
    for _ in range(2):
        poison_the_buffers(driver, rng)
        for length, logits in in_random_pieces(driver, case[2], rng).items():
            assert torch.equal(clean(logits), expected[length]), length


@pytest.mark.parametrize("block_size", [1, 8, 24, 32, 48])
@pytest.mark.parametrize("cache", ["float32", "bfloat16"])
def test_any_block_size(case: Case, cache: str, block_size: int) -> None:
    """Sixteen tokens a block take a path of their own; the bits are the same."""
    expected = alone(case, "int8", cache)
    driver = driver_of(case, "int8", cache, block_size=block_size, num_blocks=1400 // block_size)
    rng = random.Random(block_size)
    for length, logits in in_random_pieces(driver, case[2], rng).items():
        assert torch.equal(clean(logits), expected[length]), length


@PAIRS
def test_a_bad_sequence_spoils_no_other(case: Case, weights: str, cache: str) -> None:
    """NaN everywhere in a prompt and in a decode of the same batch: the neighbours' bits stay, its own rows say NaN."""
    expected = alone(case, weights, cache)
    driver = driver_of(case, weights, cache)
    tokens = case[2]
    good, other, bad = driver.request(130), driver.request(33), driver.request(40)
    first = driver.step((good, tokens[131][:100]), (bad, [POISON] * 20), (other, tokens[33][:32]))
    second = driver.step((bad, [POISON]), (good, tokens[131][100:130]), (other, tokens[33][32:]))
    assert torch.isnan(first[1]).all()
    assert torch.isnan(second[0]).all()
    assert torch.equal(clean(torch.cat((first[0], second[1]))), expected[131][:130])
    assert torch.equal(clean(torch.cat((first[2], second[2]))), expected[33])


@PAIRS
def test_shared_blocks(case: Case, weights: str, cache: str) -> None:
    """A prefix computed once and read by three: what prefix caching does."""
    expected = alone(case, weights, cache)
    driver = driver_of(case, weights, cache)
    tokens = case[2][300]
    owner = driver.request(300)
    driver.step((owner, tokens))
    sharers = [Request(owner.table[: cut // 16] + driver.request(300 - cut).table, cut) for cut in (16, 128, 288)]
    got = driver.step(*[(sharer, tokens[sharer.length :]) for sharer in sharers])
    for cut, logits in zip((16, 128, 288), got, strict=True):
        assert torch.equal(clean(logits), expected[300][cut:])


def poison_the_buffers(driver: CpuDriver, rng: random.Random) -> None:
    requests = [driver.request(length) for length in rng.sample(range(2, 80), 4)]
    driver.step(*[(request, [POISON] * (1 if i == 0 else 16 * len(request.table))) for i, request in enumerate(requests)])
    for request in requests:
        driver.release(request)


def in_random_pieces(driver: CpuDriver, tokens: dict[int, list[int]], rng: random.Random) -> dict[int, Tensor]:
    """Random subsets of the sequences step by step, each with a random piece (often one token), in random order."""
    requests = {length: driver.request(length) for length in tokens}
    out: dict[int, list[Tensor]] = {length: [] for length in tokens}
    while unfinished := [length for length, request in requests.items() if request.length < length]:
        chosen = rng.sample(unfinished, rng.randint(1, len(unfinished)))
        work: list[tuple[Request, Sequence[int]]] = []
        for length in chosen:
            start = requests[length].length
            size = rng.choice((1, rng.randint(1, 20), rng.randint(1, 200)))
            work.append((requests[length], tokens[length][start : start + size]))
        for length, logits in zip(chosen, driver.step(*work), strict=True):
            out[length].append(logits)
    for request in requests.values():
        driver.release(request)
    return {length: torch.cat(parts) for length, parts in out.items()}
