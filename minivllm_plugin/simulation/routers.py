"""Which replica gets a request. Sees what a front end sees: what it sent where, and what has come back.

A router is any callable ``(RoutedRequest, loads) -> replica number``; ``loads[i]`` are the prompt and output tokens asked of
replica ``i`` in requests that have not ended by the arrival. Those here are made anew for each simulation.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import NamedTuple, TypeAlias

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation.prefix_tree import PrefixTree
from minivllm_plugin.simulation.trace import TraceRequest

__all__ = ["ROUTERS", "LeastLoaded", "PrefixAware", "RoundRobin", "RoutedRequest", "Router", "make_router", "route"]


class RoutedRequest(NamedTuple):
    """What a router is told of a request.

    Attributes:
        number: its place in the trace.
        contents: content ids of its prompt from the start, and how many tokens each stands for.
    """

    number: int
    request: TraceRequest
    contents: tuple[tuple[int, int], ...]


Router: TypeAlias = Callable[[RoutedRequest, SequenceABC[int]], int]


class RoundRobin:
    """One after another."""

    def __init__(self) -> None:
        self._next = 0

    def __call__(self, routed: RoutedRequest, loads: SequenceABC[int]) -> int:
        chosen = self._next % len(loads)
        self._next += 1
        return chosen


class LeastLoaded:
    """The replica of which the fewest tokens are asked; of equals the first."""

    def __call__(self, routed: RoutedRequest, loads: SequenceABC[int]) -> int:
        return loads.index(min(loads))


class PrefixAware:
    """The replica that was sent the longest start of this prompt, unless it has far more to do than another.

    It remembers what was sent, not what a cache still holds, and forgets what was sent longest ago.

    Args:
        max_imbalance: a replica with this many times the least load (and more than a prompt's worth) counts as overloaded; then
            the least loaded one is taken.
        max_contents: pieces of prompts remembered per replica.
    """

    def __init__(self, max_imbalance: float = 1.5, max_contents: int = 100_000) -> None:
        if max_imbalance < 1:
            raise ConfigError(f"max_imbalance must be at least 1, got {max_imbalance!r}")
        self.max_imbalance = max_imbalance
        self.max_contents = max_contents
        self._trees: list[PrefixTree] = []

    def __call__(self, routed: RoutedRequest, loads: SequenceABC[int]) -> int:
        if not self._trees:
            self._trees = [PrefixTree(self.max_contents) for _ in loads]
        matches = [tree.match(routed.contents) for tree in self._trees]
        least = min(loads)
        allowed = least * self.max_imbalance + routed.request.prompt_tokens
        chosen = min(range(len(loads)), key=lambda number: (loads[number] > allowed, -matches[number], loads[number]))
        self._trees[chosen].insert(routed.contents)
        return chosen


ROUTERS: dict[str, Callable[[], Router]] = {
    "round_robin": RoundRobin,
    "least_loaded": LeastLoaded,
    "prefix_aware": PrefixAware,
}


def make_router(router: str | Router) -> Router:
    """A fresh one by name, or the given callable.

    Raises:
        ConfigError: neither.
    """
    if isinstance(router, str):
        made = ROUTERS.get(router.replace("-", "_"))
        if made is None:
            raise ConfigError(f"no router is called {router!r}; known are {', '.join(ROUTERS)}, or pass a callable")
        return made()
    if not callable(router) or isinstance(router, type):
        raise ConfigError(f"router must be a name or a callable (an object, not a class), got {router!r}")
    return router


def route(router: Router, index: int, request: TraceRequest, block_tokens: int, loads: list[int]) -> int:
    """Ask ``router``; its answer is checked.

    Raises:
        ConfigError: it named no replica.
    """
    chosen = router(RoutedRequest(index, request, _contents(request, block_tokens)), tuple(loads))
    if isinstance(chosen, bool) or not isinstance(chosen, int) or not 0 <= chosen < len(loads):
        raise ConfigError(f"the router answered {chosen!r} for request {index}; it must be 0..{len(loads) - 1}")
    return chosen


def _contents(request: TraceRequest, block_tokens: int) -> tuple[tuple[int, int], ...]:
    offset = request.id_offset
    if request.segments:
        return tuple((content + offset, tokens) for content, tokens in request.segments)
    return tuple((content + offset, block_tokens) for content in request.hash_ids)
