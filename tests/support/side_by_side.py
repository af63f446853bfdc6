"""Programs in processes of their own that a module's tests start: two at a time.

Most of what such a program does is importing, which keeps one core busy, so a test that waits for its own leaves the rest of the
machine idle. Each still has its own process and its own test. Called on the thread of the tests.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest

__all__ = ["started"]

T = TypeVar("T")
AT_ONCE = 2


@contextmanager
def started(request: pytest.FixtureRequest, parameter: str, run: Callable[[Any], T]) -> Iterator[dict[Any, "Future[T]"]]:
    """Call ``run`` with every value that ``parameter`` has in those tests of this run that use the fixture that asks.

    Args:
        request: of a module's fixture, which has a parameter in each of its tests.
        run: called on a thread; starts the program and waits for its end.

    Yields:
        What each call will have returned, by the value. None is running any more when the context is left.
    """
    chosen = [
        item.callspec.params[parameter]  # type: ignore[attr-defined]  # an item with parameters is a Function
        for item in request.session.items
        if item.path == request.path and request.fixturename in item.fixturenames  # type: ignore[attr-defined]
    ]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="side-by-side") as pool:
        try:
            yield {value: pool.submit(run, value) for value in dict.fromkeys(chosen)}
        finally:
            pool.shutdown(cancel_futures=True)
