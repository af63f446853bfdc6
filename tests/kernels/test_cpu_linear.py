"""Matrix products of the CPU kernels: against float64, int8 against an exact emulation, and a row alone against any batch."""

import functools

import numpy as np
import pytest
import torch
from cpu_models import CACHE_KINDS, WEIGHT_KINDS, need_cpu_kernels
from torch import Tensor

from minivllm_kernels.cpu.library import kernel_library
from minivllm_kernels.cpu.packing import PackedMatrix, interleave_gate_up, pack_matrix

STORE, ADD, SILU_MUL = 0, 1, 2
ROW_COUNTS = (*range(1, 14), 32, 65, 257)
SHAPES = [(1, 1), (31, 17), (32, 64), (33, 63), (97, 65), (160, 200), (64, 576)]  # output channels, depth


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    need_cpu_kernels()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def multiply(packed: PackedMatrix, x: Tensor, *, end: int = STORE, start: Tensor | None = None, threads: int = 1) -> Tensor:
    """``[rows, channels]`` with the padded channels; the output starts as NaN, or as ``start`` for ADD."""
    width = packed.channels // (2 if end == SILU_MUL else 1)
    out = torch.full((len(x), width), torch.nan) if start is None else start.clone()
    struct = packed.struct()
    kernel_library().minivllm_linear(struct, x.data_ptr(), len(x), x.shape[1], out.data_ptr(), end, threads)
    return out


def quantise_weight(weight: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """What the documentation says of weights: one scale a channel, peak / 127, nearest."""
    peak = weight.abs().amax(dim=1).numpy().astype(np.float32)
    scale = peak / np.float32(127)
    inverse = np.divide(np.float32(1), scale, where=scale > 0, out=np.zeros_like(scale))
    return np.rint(weight.numpy() * inverse[:, None]).astype(np.int64), scale


def emulate_int8(weight: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """The quantised product to the last bit: integers per group of activations, groups folded in ascending order by FMA."""
    group = kernel_library().minivllm_group()
    q_weight, w_scale = quantise_weight(weight)
    out = np.zeros((len(x), len(weight)), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(0, x.shape[1], group):
            part = x[:, k : k + group].numpy()
            peak = np.abs(part).max(axis=1)
            inverse = np.where(peak > 1e-36, np.float32(127) / np.where(peak > 1e-36, peak, 1), 0).astype(np.float32)
            q = np.rint(part * inverse[:, None]).astype(np.int64)
            scale = peak * (np.float32(1) / np.float32(127))
            # Exact in float64 but for the last addition: one rounding, as an FMA does.
            out = ((q @ q_weight[:, k : k + group].T) * scale[:, None].astype(np.float64) + out).astype(np.float32)
        out *= w_scale
    return torch.from_numpy(out) if bias is None else torch.from_numpy(out) + bias


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_float_kinds_against_float64(kind: str, shape: tuple[int, int], with_bias: bool) -> None:
    channels, depth = shape
    weight, bias = random(*shape), random(channels, seed=1) if with_bias else None
    exact = (weight.bfloat16() if kind == "bfloat16" else weight).double()
    packed = pack_matrix(weight, kind, bias)
    for rows in (1, 2, 7, 9, 65):
        x = random(rows, depth, seed=rows)
        expected = x.double() @ exact.T + (0 if bias is None else bias.double())
        bound = (x.double().abs() @ exact.abs().T + 1) * 1e-6
        out = multiply(packed, x)[:, :channels].double()
        assert ((out - expected).abs() <= bound).all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
def test_int8_is_exactly_what_is_documented(shape: tuple[int, int], with_bias: bool) -> None:
    channels, depth = shape
    weight, bias = random(*shape), random(channels, seed=1) if with_bias else None
    packed = pack_matrix(weight, "int8", bias)
    for rows in (1, 2, 7, 9, 65):
        x = random(rows, depth, seed=rows)
        assert torch.equal(multiply(packed, x)[:, :channels], emulate_int8(weight, x, bias))


def emulate_bfloat16_dot(weight: Tensor, x: Tensor) -> Tensor:
    """Factors rounded to bfloat16, those below 2^-56 made zeros; of each pair of products the odd one is added first, by FMA."""

    def factors(values: Tensor) -> np.ndarray:
        rounded = torch.nn.functional.pad(values, (0, -values.shape[1] % 2)).bfloat16().double()
        return rounded.where(rounded.abs() >= 2.0**-56, torch.zeros(())).numpy()

    a, b = factors(x), factors(weight)
    out = np.zeros((len(a), len(b)), np.float32)
    for pair in range(0, a.shape[1], 2):
        for k in (pair + 1, pair):  # one rounding each: exact in float64 but for the addition
            out = (out + np.outer(a[:, k], b[:, k])).astype(np.float32)
    return torch.from_numpy(out)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_dot_is_exactly_what_is_documented(shape: tuple[int, int]) -> None:
    weight = random(*shape)
    for rows in (1, 2, 7, 9, 65):
        x = random(rows, shape[1], seed=rows)
        assert torch.equal(multiply(pack_matrix(weight, "bfloat16_dot"), x)[:, : shape[0]], emulate_bfloat16_dot(weight, x))


@pytest.mark.parametrize("magnitude", [1e30, 1e-10, 2e-17, 1e-20, 1e-39])
def test_bfloat16_dot_of_large_and_vanishing_values(magnitude: float) -> None:
    """Half of the weights or activations are of another magnitude; what is below 2^-56 counts as nothing, never as a denormal."""
    weight, x = random(40, 130), random(6, 130, seed=1)
    weight[:, ::3] *= magnitude
    assert torch.equal(multiply(pack_matrix(weight, "bfloat16_dot"), x)[:, :40], emulate_bfloat16_dot(weight, x))
    weight, x = random(40, 130), x * magnitude
    assert torch.equal(multiply(pack_matrix(weight, "bfloat16_dot"), x)[:, :40], emulate_bfloat16_dot(weight, x))


def test_int8_is_close_to_float64() -> None:
    """Not only what is documented but worth documenting: within two percent on 576 random values."""
    weight, x = random(160, 576), random(33, 576, seed=1)
    expected = x.double() @ weight.double().T
    error = multiply(pack_matrix(weight, "int8"), x).double() - expected
    assert error.norm() < 0.02 * expected.norm()


@functools.cache
def _alone(kind: str) -> tuple[PackedMatrix, Tensor, Tensor]:
    packed = pack_matrix(random(97, 200), kind, random(97, seed=1))
    x = random(max(ROW_COUNTS), 200, seed=2)
    return packed, x, torch.cat([multiply(packed, x[i : i + 1]) for i in range(len(x))])


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_a_row_alone_equals_the_row_in_any_batch_bitwise(kind: str, rows: int) -> None:
    packed, x, alone = _alone(kind)
    for first in {0, 1, 100, len(x) - rows}:
        if first + rows <= len(x):
            assert torch.equal(multiply(packed, x[first : first + rows]), alone[first : first + rows])


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_threads_and_padding_change_nothing(kind: str) -> None:
    packed, x, alone = _alone(kind)
    for threads in (1, 2, 3, 5):
        assert torch.equal(multiply(packed, x[:65], threads=threads), alone[:65])
    assert not multiply(packed, x[:3])[:, 97:].any()  # channels that do not exist


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_residual_and_gated_endings(kind: str) -> None:
    weight, x = random(160, 200), random(13, 200, seed=1)
    packed = pack_matrix(weight, kind)
    residual = random(13, 160, seed=2)
    assert torch.equal(multiply(packed, x, end=ADD, start=residual), multiply(packed, x) + residual)
    gate_up = multiply(packed, x)
    gated = multiply(pack_matrix(interleave_gate_up(weight), kind), x, end=SILU_MUL)
    gate, up = gate_up.double().chunk(2, dim=1)
    torch.testing.assert_close(gated.double(), torch.nn.functional.silu(gate) * up, rtol=1e-6, atol=1e-7)


def test_silu_at_its_ends() -> None:
    """Gates from -inf's neighbourhood to +inf's: no overflow, and exact where it must be."""
    gates = [-3e38, -1e4, -100.0, -88.0, -87.0, -20.0, -1e-30, -0.0, 0.0, 1e-30, 20.0, 87.0, 100.0, 1e4, 3e38]
    weight = torch.zeros(32, 16)
    weight[:16, 0] = 1.0  # gate is x[0], up is x[1]
    weight[16:, 1] = 1.0
    x = torch.zeros(len(gates), 16)
    x[:, 0], x[:, 1] = torch.tensor(gates), 1.0
    out = multiply(pack_matrix(weight, "float32"), x, end=SILU_MUL)[:, 0]
    torch.testing.assert_close(out.double(), torch.nn.functional.silu(torch.tensor(gates).double()), rtol=1e-6, atol=1e-36)


@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_zero_rows_and_dead_channels_give_the_bias(kind: str) -> None:
    weight, bias = random(40, 130), random(40, seed=1)
    weight[3] = 0.0
    x = random(5, 130, seed=2)
    x[1] = 0.0
    x[4, :64] = 0.0  # one whole group
    out = multiply(pack_matrix(weight, kind, bias), x)[:, :40]
    assert torch.equal(out[1], bias)
    assert torch.equal(out[:, 3], bias[3].expand(5))
    if kind == "int8":
        assert torch.equal(out, emulate_int8(weight, x, bias))


@pytest.mark.parametrize("magnitude", [3e37, 1e30, 1e-30, 2e-36, 1e-37, 1e-39, 1.4e-45])
@pytest.mark.parametrize("kind", CACHE_KINDS)
def test_magnitudes(kind: str, magnitude: float) -> None:
    """Finite and right up to what a float holds; below 1e-36 int8 takes a group for zeros. int4 has half floats for scales."""
    weight, x = random(40, 130) * 0.1, random(6, 130, seed=1).clamp(-2, 2) * magnitude
    packed = pack_matrix(weight, kind)
    out = multiply(packed, x)[:, :40]
    if kind == "int8":
        assert torch.equal(out, emulate_int8(weight, x, None))
        return
    exact = (weight.bfloat16() if kind == "bfloat16" else weight).double()
    torch.testing.assert_close(out.double(), x.double() @ exact.T, rtol=1e-4, atol=1e-5 * magnitude + 1e-42)


@pytest.mark.parametrize("magnitude", [1e36, 1e-30, 1e-37, 1e-39, 1.4e-45])
def test_magnitudes_of_weights(magnitude: float) -> None:
    weight, x = random(40, 130).clamp(-2, 2) * magnitude, random(6, 130, seed=1)
    weight[:, 7] = 0.0
    for kind in CACHE_KINDS:
        out = multiply(pack_matrix(weight, kind), x)[:, :40].double()
        assert torch.isfinite(out).all()
        expected = x.double() @ weight.double().T
        # A channel below 127 * 1e-38 becomes zeros; what denormal floats cannot say is lost in any kind.
        tolerance = 0.02 if magnitude > 1e-36 else 1.0
        assert (out - expected).norm() <= tolerance * expected.norm() + 1e-42


def test_a_bad_weight_spoils_its_channel_and_no_other() -> None:
    weight, x = random(40, 130), random(6, 130, seed=1)
    for kind in WEIGHT_KINDS:
        clean = multiply(pack_matrix(weight, kind), x)
        for bad in (torch.nan, torch.inf):
            spoilt = weight.clone()
            spoilt[11, 100] = bad
            out = multiply(pack_matrix(spoilt, kind), x)
            assert not torch.isfinite(out[:, 11]).any()
            assert torch.equal(out[:, :11], clean[:, :11])
            assert torch.equal(out[:, 12:], clean[:, 12:])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf], ids=str)
@pytest.mark.parametrize("kind", WEIGHT_KINDS)
def test_a_bad_value_spoils_its_row_and_no_other(kind: str, bad: float) -> None:
    weight, x = random(97, 200), random(13, 200, seed=1)
    packed = pack_matrix(weight, kind)
    clean = multiply(packed, x)
    for column in (0, 70, 199):
        spoilt = x.clone()
        spoilt[5, column] = bad
        out = multiply(packed, spoilt)
        assert not torch.isfinite(out[5, :97]).any()
        assert torch.equal(out[:5], clean[:5])
        assert torch.equal(out[6:], clean[6:])
