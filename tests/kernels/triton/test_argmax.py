"""The most likely token of each row, interpreted, against torch: ties, NaN, infinities, strides, every split of a row."""

import pytest
import torch

import minivllm_kernels as kernels
from minivllm_kernels.triton import argmax as module
from minivllm_kernels.triton.argmax import argmax, argmax_and_peak, key_value, ordered_key, split


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 2), (4, 97), (2, 5000), (1, 151_936), (0, 8)])
def test_the_index_and_the_value_are_those_of_torch(rows: int, width: int, dtype: torch.dtype) -> None:
    logits = (torch.randn(rows, width) * 4).to(dtype)  # in 16 bits, large vocabularies have ties
    tokens, peaks = argmax_and_peak(logits)
    assert (tokens.dtype, peaks.dtype) == (torch.int64, torch.float32)
    assert torch.equal(tokens, logits.argmax(dim=-1))
    assert torch.equal(peaks, logits.max(dim=-1).values.float())


@pytest.mark.parametrize(("block", "programs"), [(16, 1), (16, 1000), (64, 12), (4096, 1)])
def test_odd_rows_however_they_are_split(block: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BLOCK", block)
    monkeypatch.setattr(module, "PROGRAMS", programs)
    logits = torch.randn(9, 150)
    logits[0] = 0.0  # ties: the lowest index
    logits[1, [20, 70, 140]] = 50.0
    logits[2], logits[2, 77] = -0.0, 0.0  # equal, so the first
    logits[3] = -torch.inf
    logits[4, [30, 100]], logits[4, 10] = torch.nan, torch.inf
    logits[5, 149] = torch.nan
    logits[6, 90] = torch.inf
    logits[7] = -1e30
    tokens, peaks = argmax_and_peak(logits)
    assert torch.equal(tokens, logits.argmax(dim=-1))
    assert tokens[:8].tolist() == [0, 20, 0, 0, 30, 149, 90, 0]
    assert torch.equal(peaks.isfinite(), torch.tensor([True, True, True, False, False, False, False, True, True]))


def test_a_negative_nan_is_a_nan_too() -> None:
    logits = torch.zeros(1, 8)
    logits.view(torch.int32)[0, 3] = -1
    assert argmax_and_peak(logits)[0].tolist() == [3]


def test_rows_of_a_wider_tensor_are_read_by_their_stride() -> None:
    wide = torch.randn(5, 64)
    wide[:, 50:] = 1e9  # padding
    assert torch.equal(argmax(wide[:, :50]), wide[:, :50].argmax(dim=-1))


def test_parts_cover_the_row_and_never_more_than_they_must() -> None:
    for rows, width in [(1, 1), (1, 151_936), (7, 2049), (256, 151_936), (1000, 128_256), (3, 262_144)]:
        block, columns, parts = split(rows, width)
        assert columns % block == 0
        assert (parts - 1) * columns < width <= parts * columns
        assert rows * parts <= max(rows, 2 * module.PROGRAMS)


def test_the_public_op_is_this_one_where_it_is_forced(forced_interpreter: None) -> None:
    choice = next(choice for choice in kernels.explain("cpu") if choice.op == "argmax")
    assert (choice.backend, choice.function) == ("interpreter", argmax)
    logits = torch.randn(3, 40)
    assert torch.equal(kernels.argmax(logits), logits.argmax(dim=-1))


@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(4), r"must be \[S, V\]"),
        (torch.zeros(2, 0), "at least one column"),
        (torch.zeros(2, 3, dtype=torch.int64), "float32, bfloat16 and float16"),
        (torch.zeros(8, 6).t(), r"strides \(1, 6\)"),
    ],
)
def test_what_is_no_matrix_of_logits_is_refused(logits: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        argmax(logits)


def test_keys_order_floats_and_give_them_back() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def both(x, keys, back):  # type: ignore[no-untyped-def]
        place = tl.arange(0, 16)
        key = ordered_key(tl.load(x + place))
        tl.store(keys + place, key)
        tl.store(back + place, key_value(key))

    x = torch.tensor(
        [-torch.inf, -3e38, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1e-30, 1.0, 1.0000001, 3e38, torch.inf, 2.0, 2.0, 2.0, 2.0]
    )
    keys, back = torch.empty(16, dtype=torch.int32), torch.empty(16)
    both[(1,)](x, keys, back)
    assert torch.equal(back, x)
    assert keys[:12].tolist() == sorted(keys[:12].tolist())
    assert (keys[4] == keys[5], keys[3] < keys[4], keys[5] < keys[6]) == (True, True, True)
    assert int(keys[0]) == -2139095041
