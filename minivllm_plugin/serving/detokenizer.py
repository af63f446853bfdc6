"""One request's tokens become text on the consumer's side, and stop strings end it.

Owns the text of one request and the state of its stop search; knows nothing about engines, queues or threads (one thread
at a time calls it). Everything is decided token by token, so the result does not depend on how tokens are batched:

- Joined deltas always equal :attr:`Detokenizer.text`; without a stop string that is the tokenizer's ``decode``.
- No delta holds half a character, nor text that could still turn out to be the beginning of a stop string.
- The match that *completes first* wins; of those that complete at the same character, the one that began first. This is
  what reading the text character by character gives, so it does not depend on where token edges fall.
- A match counts only if token number ``min_tokens`` or a later one completes it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.serving.token_text import TextStream
from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["Detokenizer", "TextDelta"]


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one call added.

    Attributes:
        text: new visible text, possibly empty.
        num_tokens: how many of the tokens given were consumed; fewer than given only when a stop string was completed.
        stop_reason: the stop string that ended the text, in the delta that ended it and in every later one.
    """

    text: str
    num_tokens: int
    stop_reason: str | None = None


class Detokenizer:
    """Text of one request. ``tokenizer=None`` (a model without one) always gives empty text."""

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._stream: TextStream | None = None
        if tokenizer is not None:
            self._stream = tokenizer.text_stream(skip_special_tokens=params.skip_special_tokens, context_ids=prompt_token_ids)
        stop = tuple(params.stop or ())
        self._search = _StopSearch(stop) if stop and tokenizer is not None else None
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._num_tokens = 0
        self._held = ""
        self._parts: list[str] = []
        self._stop_reason: str | None = None
        self._is_finished = False

    @property
    def text(self) -> str:
        """All text handed out so far."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def stop_reason(self) -> str | None:
        """The stop string that ended the text, else None."""
        return self._stop_reason

    def feed(self, token_ids: Sequence[int]) -> TextDelta:
        """Consume tokens in order, up to and including the one that completes a stop string.

        Tokens that end a completion (end tokens, ``stop_token_ids``) are not fed; they go to :meth:`finish`.
        """
        if self._is_finished or self._stop_reason is not None:
            return TextDelta("", 0, self._stop_reason)
        if self._stream is None:
            return TextDelta("", len(token_ids))
        push, search = self._stream.push, self._search
        if search is None:
            return self._hand_out("".join([push(token_id) for token_id in token_ids]), len(token_ids))
        fresh: list[str] = []
        for count, token_id in enumerate(token_ids, 1):
            self._num_tokens += 1
            if piece := push(token_id):
                fresh.append(piece)
                if (end := search.advance(piece, honour=self._num_tokens >= self._min_tokens)) is not None:
                    return self._cut("".join(fresh), len(piece) - end, count)
        return self._hand_out("".join(fresh), len(token_ids), hold=search.num_held)

    def finish(self, end_reason: str, stop_token: int | None = None) -> TextDelta:
        """End the text: release what was held back, flush a cut character as U+FFFD. Further calls give nothing.

        Args:
            end_reason: why it ended (``stop``, ``length``, ``abort``, ``error``); held text is released for all of them.
            stop_token: the end or stop token that ended it, if one did; it must not have been fed. Its text is dropped
                unless ``include_stop_str_in_output``.
        """
        if self._is_finished or self._stop_reason is not None:
            return TextDelta("", 0, self._stop_reason)
        self._is_finished = True
        num_tokens = 0 if stop_token is None else 1
        if self._stream is None:
            return TextDelta("", num_tokens)
        tail = self._stream.push(stop_token) if stop_token is not None and self._include_stop and end_reason == "stop" else ""
        tail += self._stream.flush()
        self._num_tokens += num_tokens
        if self._search is not None and tail:
            # A flushed half character may complete a stop string that contains U+FFFD; cut it like any other.
            end = self._search.advance(tail, honour=self._num_tokens >= self._min_tokens)
            if end is not None:
                return self._cut(tail, len(tail) - end, num_tokens)
        return self._hand_out(tail, num_tokens)

    def _hand_out(self, fresh: str, num_tokens: int, hold: int = 0) -> TextDelta:
        text = self._held + fresh
        self._held = text[len(text) - hold :]
        return self._emit(text[: len(text) - hold], num_tokens)

    def _cut(self, fresh: str, num_behind: int, num_tokens: int) -> TextDelta:
        """End at the match, which ends ``num_behind`` characters before the end of ``fresh``."""
        search = self._search
        assert search is not None
        self._stop_reason = search.matched
        text = self._held + fresh
        self._held = ""
        end = len(text) - num_behind - (0 if self._include_stop else len(search.matched))
        return self._emit(text[:end], num_tokens)

    def _emit(self, text: str, num_tokens: int) -> TextDelta:
        if text:
            self._parts.append(text)
        return TextDelta(text, num_tokens, self._stop_reason)


class _StopSearch:
    """All stop strings at once (Aho-Corasick): one dictionary step a character, however many strings there are."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self._match = [""]  # the longest stop string that ends in this state
        self._depth = [0]
        for string in stop:
            self._add(string)
        self._link()
        self._state = 0
        self.matched = ""

    @property
    def num_held(self) -> int:
        """How many characters at the end of the text could be the beginning of a stop string."""
        state = self._state
        while state and not self._next[state]:  # a complete string that was not honoured; something shorter may go on
            state = self._fail[state]
        return self._depth[state]

    def advance(self, text: str, *, honour: bool) -> int | None:
        """Read ``text``; the end offset in it of the first match, with :attr:`matched` set, or None."""
        transitions, fail, match, state = self._next, self._fail, self._match, self._state
        for offset, char in enumerate(text, 1):
            while state and char not in transitions[state]:
                state = fail[state]
            state = transitions[state].get(char, 0)
            if honour and match[state]:
                self.matched = match[state]
                self._state = state
                return offset
        self._state = state
        return None

    def _add(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._fail.append(0)
                self._match.append("")
                self._depth.append(self._depth[state] + 1)
            state = self._next[state][char]
        self._match[state] = string

    def _link(self) -> None:
        """Breadth first, so that a state's shorter suffixes are finished before it."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            self._match[state] = self._match[state] or self._match[self._fail[state]]
            for char, child in self._next[state].items():
                fallback = self._fail[state]
                while fallback and char not in self._next[fallback]:
                    fallback = self._fail[fallback]
                self._fail[child] = self._next[fallback].get(char, 0)
                queue.append(child)
