"""Sampling on the compiled kernels against plain torch: the same tokens for the same draws."""

import random

import pytest
import torch

from minivllm_kernels import TokenDraw, reference
from minivllm_kernels.dispatch import why_not

pytestmark = pytest.mark.skipif(why_not("cpu", "cpu") is not None, reason="no compiler here")


def draws(rng: random.Random, count: int, vocab: int) -> list[TokenDraw]:
    return [
        TokenDraw(
            uniform=rng.choice([0.0, rng.random(), rng.random(), 1 - 2**-53]),
            temperature=rng.choice([1e-5, 1e-3, 0.2, 1.0, 3.0]),
            top_k=rng.choice([0, 0, 1, 2, 40, vocab - 1, vocab, vocab + 1]),
            top_p=rng.choice([1.0, 1.0, 0.999, 0.95, 0.5, 1e-6]),
            min_p=rng.choice([0.0, 0.0, 0.05, 1.0]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("vocab", [1, 5, 16, 97, 1024, 5000])
def test_the_same_draw_gives_the_same_token(seed: int, vocab: int) -> None:
    from minivllm_kernels.cpu import ops

    rng = random.Random(seed * 1000 + vocab)
    logits = torch.randn(24, vocab, generator=torch.Generator().manual_seed(seed)) * rng.choice([0.01, 1.0, 8.0])
    if vocab > 4:
        logits[3, : vocab // 2] = -torch.inf
        logits[4] = 1.0  # nothing but ties
    wanted = draws(rng, 24, vocab)
    got, expected = ops.sample(logits, wanted), reference.sample(logits, wanted)
    for row in range(24):
        if got[row] != expected[row]:  # rounding may move a border: then the two tokens are neighbours at it
            assert borders(logits[row], wanted[row], int(got[row]), int(expected[row])), (row, wanted[row])


def borders(logits: torch.Tensor, draw: TokenDraw, one: int, other: int) -> bool:
    """Whether moving the draw, or top_p, by a hair makes plain torch choose ``one``."""
    for shift in (-1e-5, 1e-5):
        for lean in (-1e-5, 0.0, 1e-5):
            moved = TokenDraw(
                min(max(draw.uniform + shift, 0.0), 1 - 2**-53),
                draw.temperature,
                draw.top_k,
                min(max(draw.top_p * (1 + lean), 1e-9), 1.0),
                draw.min_p * (1 + lean),
            )
            if one == int(reference.sample(logits.unsqueeze(0), [moved])[0]):
                return True
    return False


def test_rows_of_a_wider_tensor_are_read_by_their_stride() -> None:
    from minivllm_kernels.cpu import ops

    wide = torch.randn(6, 64)
    rows = [TokenDraw(0.3 + row / 10, top_k=5) for row in range(6)]
    wide[:, 50:] = 1e9  # padding
    assert torch.equal(ops.sample(wide[:, :50], rows), reference.sample(wide[:, :50].clone(), rows))
