"""Token lists that cost nothing: a prompt as runs of equal tokens, a completion as a count.

The scheduler asks a sequence's tokens for their number and for the slice that makes a block. Both are answered here from a
few numbers, so that 100,000 waiting prompts of 12,000 tokens fit into memory. What is promised: two slices are equal exactly
if their *content ids* are, place by place. Knows no scheduler and no time.
"""

from bisect import bisect_right
from collections.abc import Iterator
from collections.abc import Sequence as SequenceABC
from typing import overload

__all__ = ["MAX_CONTENT_ID", "SyntheticTokens", "own_completion", "own_prompt", "shared_content", "synthetic"]

MAX_CONTENT_ID = 2**60
"""Content ids of a trace are below it: their tokens must stay within signed 64 bits."""

KINDS = 3  # of content, kept apart by the remainder of the token id


def shared_content(content_id: int) -> int:
    """The token that stands wherever a trace names this content: a hash id, a segment, or an answer that others quote."""
    return KINDS * content_id


def own_prompt(index: int) -> int:
    """The token of the part of request ``index``'s prompt that no other request has."""
    return KINDS * index + 1


def own_completion(index: int) -> int:
    """The token of request ``index``'s completion, when nobody quotes it."""
    return KINDS * index + 2


class SyntheticTokens:
    """Stands where a Sequence holds its list of token ids.

    Args:
        tokens: one token for each run of the prompt.
        ends: where each run ends; the last one is the length of the prompt.
        completion: the token that every appended one is.
    """

    __slots__ = ("_ends", "_length", "_prompt_length", "_tokens", "completion")

    def __init__(self, tokens: SequenceABC[int], ends: SequenceABC[int], completion: int) -> None:
        self._tokens = tokens
        self._ends = ends
        self._prompt_length = self._length = ends[-1]
        self.completion = completion

    def __len__(self) -> int:
        return self._length

    def append(self, token_id: int) -> None:
        """One more completion token; it is ``completion``, whatever the runner says."""
        self._length += 1

    def grow_to(self, length: int) -> None:
        """As many completion tokens as make ``length`` in all."""
        self._length = length

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...

    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._run(start, stop) if step == 1 else self._run(0, self._length)[index]
        position = index + self._length if index < 0 else index
        if not 0 <= position < self._length:
            raise IndexError(f"token {index} of {self._length}")
        return self._run(position, position + 1)[0]

    def _run(self, start: int, stop: int) -> tuple[int, ...]:
        if start >= stop:
            return ()
        prompt = self._prompt_length
        if start >= prompt:
            return (self.completion,) * (stop - start)
        run = bisect_right(self._ends, start)
        if stop <= self._ends[run]:
            return (self._tokens[run],) * (stop - start)
        pieces: tuple[int, ...] = ()
        while start < min(stop, prompt):
            end = min(self._ends[run], stop)
            pieces += (self._tokens[run],) * (end - start)
            start, run = end, run + 1
        return pieces + (self.completion,) * (stop - start)


def synthetic(tokens: object) -> SyntheticTokens:
    """What a sequence of the simulator holds as ``token_ids``, under its true type."""
    assert isinstance(tokens, SyntheticTokens), "this sequence was not made by the simulator"
    return tokens
