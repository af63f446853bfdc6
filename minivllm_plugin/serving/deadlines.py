"""Deadlines of requests: moments on ``time.monotonic()``'s clock, None for none. Any thread, no state."""

import math
import threading
import time

from minivllm_plugin.errors import InvalidRequestError

__all__ = ["deadline_after", "is_past", "seconds_left"]


def deadline_after(timeout: float) -> float | None:
    """The moment ``timeout`` seconds from now; None when no clock reaches that far.

    Raises:
        InvalidRequestError: not a number, or NaN.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or (isinstance(timeout, float) and math.isnan(timeout)):
        raise InvalidRequestError(f"timeout must be a number of seconds or None, got {timeout!r}")
    # The standard library's waits take no more than this; infinity, too, means no limit.
    return None if timeout > threading.TIMEOUT_MAX else time.monotonic() + timeout


def seconds_left(deadline: float | None) -> float | None:
    """Until ``deadline``, at least 0; what the standard library's waits take as a timeout."""
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def is_past(deadline: float | None) -> bool:
    """Whether it is time to give up."""
    return deadline is not None and time.monotonic() >= deadline
