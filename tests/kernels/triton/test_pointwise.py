"""The pointwise kernels, interpreted, against the reference over odd shapes, dtypes and strides."""

import pytest
import torch
from torch import Tensor

from minivllm_kernels import reference
from minivllm_kernels.triton.silu_and_mul import silu_and_mul

# Both round at the same places, so what differs is the exponential and the order of a sum: one unit in the last place.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
DTYPES = list(TOLERANCES)


def close(got: Tensor, expected: Tensor) -> None:
    """Same dtype and shape, no row poisoned, and the same values to the last place of the dtype."""
    assert got.dtype == expected.dtype
    tolerance = TOLERANCES[got.dtype]
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance / 4, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 13), (2, 1000), (1, 3072), (0, 8), (2, 0)])
def test_silu_and_mul(rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(rows, 2 * width) * 4).to(dtype)
    close(silu_and_mul(gate_up), reference.silu_and_mul(gate_up))
