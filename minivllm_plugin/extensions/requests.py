"""What a logits processor or a stop criterion sees of a request. Read-only; no Sequence, no cache, no neighbours."""

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as SequenceABC
from typing import Any, NamedTuple, overload

from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.sampling_parameters import SamplingParams

__all__ = ["RequestStart", "TokenView", "request_start"]


class RequestStart(NamedTuple):
    """A request at its first sampled token.

    Attributes:
        params: all of its sampling parameters.
        value: what its ``extra_args`` hold under the extension's name.
        metadata: what the caller gave along with the request.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    value: Any
    metadata: Mapping[str, Any]


class TokenView(SequenceABC[int]):
    """The completion so far, without a copy: it grows as the request does. A slice of it is a list of its own."""

    __slots__ = ("_start", "_tokens")

    def __init__(self, tokens: list[int], start: int) -> None:
        self._tokens = tokens
        self._start = start

    def __len__(self) -> int:
        return len(self._tokens) - self._start

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step > 0:
                return self._tokens[self._start + first : self._start + max(first, last) : step]
            return [self._tokens[self._start + place] for place in range(first, last, step)]
        place = index if index >= 0 else index + len(self)
        if not 0 <= place < len(self):
            raise IndexError(f"token {index} of a completion of {len(self)}")
        return self._tokens[self._start + place]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SequenceABC) and not isinstance(other, str | bytes) and self[:] == list(other)

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __repr__(self) -> str:
        return f"TokenView({self[:]})"


def request_start(seq: Sequence, value: Any) -> RequestStart:
    """The view of ``seq`` for an extension that was given ``value``."""
    return RequestStart(seq.request_id or "", tuple(seq.prompt_token_ids), seq.sampling_params, value, seq.metadata)
