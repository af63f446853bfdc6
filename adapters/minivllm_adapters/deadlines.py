"""The one clock of a call: LiteLLM hands custom providers a timeout and never enforces it, so the adapter does."""

import math
import threading
import time
from dataclasses import dataclass

from minivllm_plugin.errors import InvalidRequestError, RequestTimeoutError

__all__ = ["DEFAULT_TIMEOUT", "Deadline"]

DEFAULT_TIMEOUT = 600.0  # seconds; LiteLLM's own default for every provider


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time by which a call must have ended: model load, queueing and generation together.

    Attributes:
        timeout: seconds the caller allowed; ``inf`` is accepted and means no limit.
        expires_at: the same as a :func:`time.monotonic` value.
    """

    timeout: float
    expires_at: float

    @classmethod
    def after(cls, timeout: object) -> "Deadline":
        """The deadline of a call that starts now.

        Args:
            timeout: seconds as a number or a numeric string, an ``httpx.Timeout`` (its ``read``, else its longest part), or
                None for the default of 600 s.

        Raises:
            InvalidRequestError: not a number, not positive, or NaN.
        """
        seconds = _seconds(timeout)
        return cls(seconds, time.monotonic() + seconds)

    def remaining(self) -> float | None:
        """Seconds left, never negative; None when there is no limit."""
        return None if math.isinf(self.expires_at) else max(0.0, self.expires_at - time.monotonic())

    def expired(self, doing: str) -> RequestTimeoutError:
        """The error for a deadline that passed while ``doing`` something."""
        return RequestTimeoutError(f"timeout={self.timeout:g} s passed while {doing}; pass a larger timeout=")


def _seconds(timeout: object) -> float:
    if timeout is None:
        return DEFAULT_TIMEOUT
    if hasattr(timeout, "read") and hasattr(timeout, "connect"):  # httpx.Timeout, without importing httpx
        if timeout.read is not None:
            return _seconds(timeout.read)
        parts = [getattr(timeout, name) for name in ("connect", "write", "pool") if getattr(timeout, name, None) is not None]
        return _seconds(max(parts, default=math.inf))
    try:
        if isinstance(timeout, bool) or not isinstance(timeout, (int, float, str)):
            raise ValueError
        seconds = float(timeout)
    except ValueError:
        raise InvalidRequestError(f"timeout must be a number of seconds, got {timeout!r}") from None
    if not seconds > 0:  # also refuses NaN
        raise InvalidRequestError(f"timeout={seconds:g} must be greater than 0 seconds; leave it out for {DEFAULT_TIMEOUT:g} s")
    return seconds if seconds < threading.TIMEOUT_MAX else math.inf  # no wait of the standard library takes more
