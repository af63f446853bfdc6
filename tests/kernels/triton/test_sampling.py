"""Sampling, interpreted, against plain torch: the same tokens stay, and the same draw gives the same token.

What stays is compared exactly. With the reference in float64, for in float32 the probabilities of different logits may coincide.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import minivllm_kernels as kernels
from minivllm_kernels import DrawTensors, TokenDraw, reference
from minivllm_kernels.triton import argmax as parts_of_rows
from minivllm_kernels.triton import sampling
from minivllm_kernels.triton.sampling import sample, sample_rows, sample_with_cuts

FAST = 64  # marks a pass: fewer passes, which is what the interpreter's time goes into
ROUNDING = tuple(10.0**-digits for digits in range(6, 17, 2))  # of float32 at a border, of no weight at the ends
LEAST_WEIGHT = 2.0**-42  # of the most likely token: what has less is never drawn


def some_draws(rng: random.Random, count: int, vocab: int) -> list[TokenDraw]:
    return [
        TokenDraw(
            uniform=rng.choice([0.0, rng.random(), rng.random(), 1 - 2**-53]),
            temperature=rng.choice([1e-5, 1e-3, 0.25, 1.0, 3.0]),
            top_k=rng.choice([0, 0, 1, 2, 40, vocab - 1, vocab, vocab + 1]),
            top_p=rng.choice([1.0, 1.0, 0.999, 0.9, 0.5, 1e-6]),
            min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        )
        for _ in range(count)
    ]


def some_logits(seed: int, rows: int, vocab: int, scale: float) -> Tensor:
    """With ties, as logits from a 16-bit product have them, and a few rows of nothing else."""
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16().float()
    if vocab > 4:
        logits[0, : vocab // 2] = -torch.inf
        logits[1] = 1.0
        logits[2, ::2] = 0.0
        logits[2, 1::2] = -0.0
    return logits


def staying(logits: Tensor, draw: TokenDraw, dtype: torch.dtype) -> Tensor:
    """A mask of what plain torch keeps, in ``dtype``."""
    wide = logits.to(dtype)
    probabilities = torch.softmax((wide - wide.max()) / draw.temperature, dim=-1)
    return reference.filter_probabilities(probabilities, draw) > 0


def kept(logits: Tensor, draw: TokenDraw, cut: Tensor) -> Tensor:
    """A mask of what the kernel keeps."""
    bits = torch.where(logits == 0, 0.0, logits).view(torch.int32)
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    ties = keys == cut[0]
    weights = torch.exp((logits - logits.max()).double() / draw.temperature)
    return ((keys > cut[0]) | (ties & (ties.cumsum(0) <= cut[1]))) & (weights >= draw.min_p)


def check(logits: Tensor, draws: Sequence[TokenDraw], tokens: Tensor, cuts: Tensor) -> int:
    """All rows are right; returns how many tokens differ from the reference's, each of them at a border."""
    expected = reference.sample(logits, draws)
    for row, draw in enumerate(draws):
        matters = torch.exp((logits[row] - logits[row].max()).double() / draw.temperature) > LEAST_WEIGHT
        mine = kept(logits[row], draw, cuts[row]) & matters
        # In float64, but where so many equal tokens are top_p to the bit, a sum of thirds decides there, and float32 is right.
        theirs = [staying(logits[row], draw, dtype) & matters for dtype in (torch.float64, torch.float32)]
        assert any(torch.equal(mine, mask) for mask in theirs), (row, draw, mine.sum(), [mask.sum() for mask in theirs])
        assert kept(logits[row], draw, cuts[row])[tokens[row]], (row, draw)
        if tokens[row] != expected[row]:
            assert at_a_border(logits[row], draw, int(tokens[row])), (row, draw, tokens[row], expected[row])
    return int((tokens != expected).sum())


def at_a_border(logits: Tensor, draw: TokenDraw, token: int) -> bool:
    """Whether moving the draw by a hair makes plain torch choose ``token``."""
    places = [draw.uniform + sign * shift for shift in ROUNDING for sign in (-1, 1)]
    moved = [replace(draw, uniform=min(max(place, 0.0), 1 - 2**-53)) for place in places]
    return token in reference.sample(logits.expand(len(moved), -1), moved).tolist()


@pytest.mark.parametrize("vocab", [1, 5, 97, 2500])
@pytest.mark.parametrize(("seed", "scale"), [(0, 0.25), (1, 1.0), (2, 8.0)])
def test_the_same_tokens_stay_and_the_same_one_is_drawn(seed: int, scale: float, vocab: int) -> None:
    rng = random.Random(seed * 10_000 + vocab)
    logits, draws = some_logits(seed, 12, vocab, scale), some_draws(rng, 12, vocab)
    tokens, cuts = sample_with_cuts(logits, DrawTensors.build(draws, "cpu"), FAST)
    assert check(logits, draws, tokens, cuts) <= 2


@pytest.mark.parametrize(
    ("block", "programs", "room", "search", "ways"),
    [(64, 10_000, 4096, 1024, 8), (64, 1, 4096, 64, 4), (64, 40, 4, 128, 16), (256, 12, 4096, 64, 2)],
    ids=["many parts", "one part", "lists that are too short", "lists of many blocks"],
)
def test_a_token_does_not_depend_on_how_its_row_is_split(
    block: int, programs: int, room: int, search: int, ways: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sums are of integers, and a list that does not hold what is to be kept is passed by."""
    rng = random.Random(block)
    logits, draws = some_logits(7, 7, 500, 3.0), some_draws(rng, 7, 500)
    whole, cuts = sample_with_cuts(logits, DrawTensors.build(draws, "cpu"), FAST)
    monkeypatch.setattr(parts_of_rows, "MAX_BLOCK", block)
    monkeypatch.setattr(parts_of_rows, "PROGRAMS", programs)
    monkeypatch.setattr(sampling, "LIST_PER_PART", room)
    monkeypatch.setattr(sampling, "SEARCH_BLOCK", search)
    tokens, other_cuts = sample_with_cuts(logits, DrawTensors.build(draws, "cpu"), ways)
    assert torch.equal(tokens, whole)
    for row, draw in enumerate(draws):
        assert torch.equal(kept(logits[row], draw, cuts[row]), kept(logits[row], draw, other_cuts[row]))


def test_a_large_vocabulary() -> None:
    """Flat and cut (searched whole), peaked and cut (a list), not cut (one block), in bfloat16's steps and in float32's."""
    vocab = 151_936
    logits = torch.randn(5, vocab) * torch.tensor([0.5, 0.5, 2.5, 2.5, 2.5]).unsqueeze(1)
    logits[2:, 40_000:40_040] += torch.linspace(10, 18, 40)
    logits[3] = logits[3].bfloat16().float()
    draws = [TokenDraw(0.77, 0.6), TokenDraw(0.3, 1.0, 0, 0.9), TokenDraw(0.999, 0.8, 40, 0.95)]
    draws += [TokenDraw(0.41, 1.0, 0, 0.8, 0.01), TokenDraw(0.5, 0.2, 50, 0.99)]
    tokens, cuts = sample_with_cuts(logits, DrawTensors.build(draws, "cpu"), FAST)
    assert check(logits, draws, tokens, cuts) == 0


def test_of_equals_the_lower_ids_stay() -> None:
    logits = torch.zeros(6, 10)
    logits[4:, 5:] = 1.0
    draws = [
        TokenDraw(0.999, top_k=3),
        TokenDraw(0.999, top_p=0.6),  # six of ten, not seven as 0.6 in float32 would have it
        TokenDraw(0.999, top_k=4, top_p=0.5),
        TokenDraw(0.999, top_p=1e-9),
        TokenDraw(0.999, top_k=7),
        TokenDraw(0.0, top_k=2),
    ]
    tokens, cuts = sample_with_cuts(logits, DrawTensors.build(draws, "cpu"))
    assert tokens.tolist() == [2, 5, 1, 0, 9, 5]
    assert [int(kept(row, draw, cut).sum()) for row, draw, cut in zip(logits, draws, cuts, strict=True)] == [3, 6, 2, 1, 7, 2]
    assert check(logits, draws, tokens, cuts) == 0


def test_draws_go_round_the_whole_distribution() -> None:
    """A thousandth of the draws a thousandth further each: the tokens come in order, each as often as it is likely."""
    logits = torch.log(torch.tensor([0.125, 0.25, 0.0, 0.5, 0.125]))
    draws = [TokenDraw((index + 0.5) / 64) for index in range(64)]
    tokens = sample_rows(logits.expand(64, 5), DrawTensors.build(draws, "cpu")).tolist()
    assert tokens == [0] * 8 + [1] * 16 + [3] * 32 + [4] * 8
    assert tokens == reference.sample(logits.expand(64, 5), draws).tolist()


def test_greedy_random_and_broken_rows_side_by_side() -> None:
    logits = torch.randn(8, 200)
    logits[2, 30], logits[3, 4], logits[4] = torch.nan, torch.inf, -torch.inf
    logits[5] = torch.nan
    logits[6], logits[6, 77] = -torch.inf, -3e38
    greedy = TokenDraw(0.9, 0.0, 5, 0.5, 0.5)
    draws = [
        greedy,
        TokenDraw(0.5),
        TokenDraw(0.1, top_k=3),
        greedy,
        TokenDraw(0.5, top_p=0.5),
        TokenDraw(0.1),
        TokenDraw(0.9),
        greedy,
    ]
    tokens = sample_rows(logits, DrawTensors.build(draws, "cpu"))
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == reference.sample_rows(logits, DrawTensors.build(draws, "cpu")).tolist()
    assert tokens[2:7].tolist() == [-1, -1, -1, -1, 77]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e30])
def test_temperatures_at_the_end_of_the_range(temperature: float) -> None:
    logits = torch.tensor([[3.0, 1.0, 3.0, -40.0]] * 4)
    draws = [TokenDraw(place, temperature, top_k) for place, top_k in ((0.2, 0), (0.6, 0), (0.2, 3), (0.6, 3))]
    tokens, cuts = sample_with_cuts(logits, DrawTensors.build(draws, "cpu"))
    assert tokens.tolist() == ([0, 2, 0, 2] if temperature < 1 else [0, 2, 0, 1])
    assert check(logits, draws, tokens, cuts) == 0


def test_rows_may_be_strided_and_of_sixteen_bits_and_none() -> None:
    wide = torch.randn(6, 64).bfloat16()
    wide[:, 50:] = 1e9  # padding
    draws = [TokenDraw(0.3 + row / 10, top_k=5) for row in range(6)]
    expected = reference.sample(wide[:, :50].float(), draws)
    assert torch.equal(sample(wide[:, :50], draws), expected)
    assert torch.equal(sample(wide[:, :50].float(), draws), expected)
    assert torch.equal(sample_rows(wide.float()[:, :50], DrawTensors.build(draws, "cpu")), expected)
    assert sample(torch.empty(0, 50), []).tolist() == []


def test_as_many_draws_as_rows() -> None:
    draws = DrawTensors.build([TokenDraw(0.5)] * 4, "cpu")
    with pytest.raises(ValueError, match=r"4 draws for 3 rows of logits; use draws.first\(3\)"):
        sample_rows(torch.zeros(3, 8), draws)
    assert sample_rows(torch.zeros(3, 8), draws.first(3)).tolist() == [4, 4, 4]


def test_the_public_ops_are_these_where_they_are_forced(forced_interpreter: None) -> None:
    chosen = {choice.op: choice.function for choice in kernels.explain("cpu")}
    assert (chosen["sample"], chosen["sample_rows"]) == (sample, sample_rows)
    logits, draw = torch.randn(2, 40), TokenDraw(0.5, top_k=3)
    assert torch.equal(kernels.sample_rows(logits, DrawTensors.build([draw] * 2, "cpu")), kernels.sample(logits, [draw] * 2))


class Recorded:
    """In place of a kernel: the grids it was launched with."""

    def __init__(self, name: str, launches: list[tuple[str, tuple[int, ...]]]) -> None:
        self.name, self.launches = name, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: self.launches.append((self.name, grid))


class NoSync(TorchDispatchMode):
    """Refuses what makes the host wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket.__name__ not in {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"}, (
            func
        )
        return func(*args, **(kwargs or {}))


def test_launches_follow_from_the_shape_alone_and_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a captured graph is right for other numbers."""
    launches: list[tuple[str, tuple[int, ...]]] = []
    for module, name in [(parts_of_rows, "_peaks_kernel"), (sampling, "weigh_kernel"), (sampling, "gather_kernel")]:
        monkeypatch.setattr(module, name, Recorded(name, launches))
    monkeypatch.setattr(sampling, "_choose_kernel", Recorded("_choose_kernel", launches))
    seen = []
    for fill in (0.0, torch.nan):
        for draw in (TokenDraw(0.5, 0.0), TokenDraw(0.5, 1.0, 40, 0.9)):
            logits, draws = torch.full((4, 10_000), fill), DrawTensors.build([draw] * 4, "cpu")
            launches.clear()
            with NoSync():
                sample_rows(logits, draws)
            seen.append([*launches])
    assert seen[0] == [("_peaks_kernel", (4, 5)), ("weigh_kernel", (4, 5)), ("gather_kernel", (4, 5)), ("_choose_kernel", (4,))]
    assert all(launched == seen[0] for launched in seen)
