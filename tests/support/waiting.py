"""Bounded waiting for tests: no sleeps that hope, no test that hangs."""

import time
from collections.abc import Callable

LIMIT_SECONDS = 20.0


def wait_until(condition: Callable[[], bool]) -> None:
    """Return as soon as ``condition()`` holds; fail after 20 seconds."""
    end = time.monotonic() + LIMIT_SECONDS
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"did not become true within {LIMIT_SECONDS:g} s")
        time.sleep(0.001)
