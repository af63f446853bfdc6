"""A running event loop for Gradio's constructors: without one they open a loop that nobody closes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_event_loop"]

T = TypeVar("T")


def in_event_loop(make: Callable[[], T]) -> T:
    """``make()``, called while a loop runs, on a thread of its own: the caller's thread may have a loop already."""

    async def call() -> T:
        return make()

    with ThreadPoolExecutor(1, thread_name_prefix="minivllm-ui-build") as pool:
        return pool.submit(asyncio.run, call()).result()
