"""Waiting, in a thread or on an event loop, for what another thread is about to do: bounded, and never a measurement of speed."""

import asyncio
import time
from collections.abc import Callable

__all__ = ["aeventually", "eventually"]


def eventually(condition: Callable[[], object]) -> None:
    """Wait for what another thread is about to do; bounded, and never a measurement of speed."""
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up, "waited 30 s in vain"
        time.sleep(0.002)


async def aeventually(condition: Callable[[], object]) -> None:
    """The same on an event loop."""
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up, "waited 30 s in vain"
        await asyncio.sleep(0.002)
