"""Bounded waiting for tests: no sleeps that hope, no test that hangs."""

import time
from collections.abc import Callable

LIMIT_SECONDS = 20.0


def wait_until(condition: Callable[[], bool], seconds: float = LIMIT_SECONDS) -> None:
    """Return as soon as ``condition()`` holds; fail after ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"did not become true within {seconds:g} s")
        time.sleep(0.001)
