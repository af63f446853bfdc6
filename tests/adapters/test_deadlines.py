"""What a ``timeout`` may be, and how much of it is left."""

import math
from typing import Any

import httpx
import pytest

from minivllm_adapters.deadlines import DEFAULT_TIMEOUT, Deadline
from minivllm_plugin.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        (None, DEFAULT_TIMEOUT),
        (3, 3.0),
        (0.5, 0.5),
        ("2.5", 2.5),
        (httpx.Timeout(7), 7.0),
        (httpx.Timeout(7, read=None, pool=9), 9.0),
        (httpx.Timeout(None), math.inf),
        (math.inf, math.inf),
        (1e30, math.inf),
    ],
    ids=str,
)
def test_timeouts_of_all_kinds(given: Any, seconds: float) -> None:
    deadline = Deadline.after(given)
    assert deadline.timeout == seconds
    left = deadline.remaining()
    assert (left is None) if math.isinf(seconds) else (left is not None and 0 < left <= seconds)


@pytest.mark.parametrize("given", [0, -1, math.nan, "soon", [], True, httpx.Timeout(0)], ids=str)
def test_timeouts_that_are_none(given: Any) -> None:
    with pytest.raises(InvalidRequestError, match="timeout"):
        Deadline.after(given)
