"""Draws as tensors: what is packed comes back, padding is greedy, and the reference samples rows by them."""

import pytest
import torch

import minivllm_kernels as kernels
from minivllm_kernels import DrawTensors, TokenDraw, reference

SOME = [
    TokenDraw(1 - 2**-53, 0.5, 40, 0.9, 0.0625),
    TokenDraw(0.0, 0.0),
    TokenDraw(0.1, 2.0, 0, 1e-6, 1.0),
]


def test_draws_survive_the_way_to_the_device_and_back() -> None:
    packed = DrawTensors.build(SOME, "cpu")
    assert packed.tolist() == SOME  # the temperatures and min_p of these are float32 exactly, and 0.9 needs a float64
    assert packed.first(2).tolist() == SOME[:2]
    other = DrawTensors.allocate(3, "cpu")
    other.copy_from(packed)
    assert other.tolist() == SOME
    assert DrawTensors.build([], "cpu").tolist() == []


def test_rows_beyond_the_draws_are_greedy() -> None:
    room = DrawTensors.allocate(5, "cpu")
    room.fill(SOME)
    assert room.tolist() == [*SOME, TokenDraw(0.0, 0.0), TokenDraw(0.0, 0.0)]
    room.fill(SOME[:1])  # a shrinking batch leaves nothing of the last one
    assert [draw.temperature for draw in room.tolist()] == [0.5, 0.0, 0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="6 draws do not fit 5 rows"):
        room.fill(SOME * 2)


def test_the_reference_samples_greedy_random_and_broken_rows_side_by_side() -> None:
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    logits[2, 3], logits[3, 4], logits[4] = torch.nan, torch.inf, -torch.inf
    draws = [TokenDraw(0.3, 0.0), TokenDraw(0.7), TokenDraw(0.1), TokenDraw(0.1, 0.0), TokenDraw(0.1), TokenDraw(0.9, 0.5, 3)]
    tokens = reference.sample_rows(logits, DrawTensors.build(draws, "cpu")).tolist()
    expected = kernels.sample(logits[[1, 5]], [draws[1], draws[5]]).tolist()
    assert tokens == [int(logits[0].argmax()), expected[0], -1, -1, -1, expected[1]]
    assert kernels.sample_rows(logits[:1], DrawTensors.build(draws[:1], "cpu")).tolist() == tokens[:1]
