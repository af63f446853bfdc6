"""Which configuration is used: the card's default, unless tuning is asked for; a choice never depends on the batch."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from paged_batches import paged_batch

from minivllm_kernels.triton import attention_tuning, autotune
from minivllm_kernels.triton.attention import attention
from minivllm_kernels.triton.attention_configurations import LEAST_SPLIT, Tiles, decode_tiles, prefill_tiles
from minivllm_kernels.triton.attention_inputs import AttentionInputs
from minivllm_kernels.triton.launch import next_power_of_2

CARDS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
SHARED_MEMORY = {(8, 0): 163, (9, 0): 227, (10, 0): 227}  # KiB that a block may have; 99 on the others


def defaults() -> list[tuple[tuple[int, int], int, int, Tiles]]:
    """Card, head size, bits of the cache, tiles."""
    found = []
    for card, head_dim in itertools.product(CARDS, (16, 64, 80, 128, 192, 256)):
        for bits, kv_bits in ((16, 16), (16, 8), (32, 32), (32, 8)):
            tiles = [decode_tiles(head_dim, bits, kv_bits, group)[0] for group in (1, 7, 40)]
            tiles.append(prefill_tiles(card, head_dim, bits, kv_bits)[0])
            found += [(card, head_dim, kv_bits, each) for each in tiles]
    return found


def test_defaults_fit_every_card() -> None:
    for card, head_dim, kv_bits, tiles in defaults():
        width = next_power_of_2(head_dim)
        buffers = tiles.num_stages if card[0] in (9, 10) else tiles.num_stages - 1  # their products are asynchronous
        keys_and_values = 2 * tiles.n * width * kv_bits // 8 * buffers
        assert keys_and_values <= SHARED_MEMORY.get(card, 99) * 1024, (card, head_dim, tiles)
        assert LEAST_SPLIT % tiles.n == 0  # a split begins at a tile
        assert {size & (size - 1) for size in (tiles.m, tiles.n, tiles.num_warps)} == {0}
        assert tiles.m >= 16


def inputs_of(query_lens: Sequence[int], seq_lens: Sequence[int]) -> AttentionInputs:
    q, k_cache, v_cache, metadata = paged_batch((4, 2, 64), query_lens, seq_lens, 8, torch.float16)
    return AttentionInputs.checked(q, k_cache, v_cache, metadata, 0.1, 1.0, 1.0)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, list[str]]]:
    """What autotune was asked to choose; it takes the last candidate and measures all."""
    questions: list[tuple[str, str, list[str]]] = []

    def choose(op: str, shape: str, names: Sequence[str], measure: Callable[[int], float], device: torch.device) -> int:
        questions.append((op, shape, list(names)))
        assert all(measure(index) == 1.0 for index in range(len(names)))
        return len(names) - 1

    def once(launch: Callable[[], object]) -> float:
        launch()
        return 1.0

    monkeypatch.setattr(autotune, "choose", choose)
    monkeypatch.setattr(autotune, "milliseconds", once)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Card", (), {"multi_processor_count": 2}))
    for name, value in {"PROMPTS": 1, "PROMPT_TOKENS": 3, "DECODES": 1, "CONTEXT": 300}.items():
        monkeypatch.setattr(attention_tuning, name, value)
    return questions


def test_nothing_is_measured_unless_it_is_asked_for(
    asked: list[tuple[str, str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(attention_tuning.ENVIRONMENT_VARIABLE, raising=False)
    made = inputs_of([1, 5], [9, 5])
    assert attention_tuning.prefill_choice(made) == prefill_tiles((8, 0), 64, 16, 16)[0]
    assert attention_tuning.decode_choice(made) == decode_tiles(64, 16, 16, 2)[0]
    assert asked == []


def test_candidates_are_measured_on_a_batch_of_their_own(
    asked: list[tuple[str, str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(attention_tuning.ENVIRONMENT_VARIABLE, "1")
    before = inputs_of([1, 5], [9, 5])
    keys = before.keys.clone()
    assert attention_tuning.prefill_choice(before) == prefill_tiles((8, 0), 64, 16, 16)[-1]
    assert attention_tuning.decode_choice(before) == decode_tiles(64, 16, 16, 2)[-1]
    assert [op for op, _, _ in asked] == ["attention_prefill", "attention_decode"]
    assert torch.equal(before.keys.nan_to_num(7.0), keys.nan_to_num(7.0))
    attention_tuning.prefill_choice(inputs_of([3, 3, 3], [30, 3, 4]))
    assert asked[2][1] == asked[0][1]  # the key holds nothing of the batch


def test_the_op_computes_the_same_with_another_configuration(
    asked: list[tuple[str, str, list[str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k_cache, v_cache, metadata = paged_batch((4, 2, 64), [1, 5], [300, 5], 8, torch.float16)
    usual = attention(q, k_cache, v_cache, metadata, 0.1)
    monkeypatch.setenv(attention_tuning.ENVIRONMENT_VARIABLE, "1")
    tuned = attention(q, k_cache, v_cache, metadata, 0.1)
    assert len(asked) == 2
    torch.testing.assert_close(tuned, usual, atol=2e-3, rtol=2e-3)
