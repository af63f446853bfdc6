"""One scripted completion: its steps are played one token at a time, with the limits that every engine holds.

One script step is one token: a ``str`` is its text, a ``Token`` its text and how likely it was, a ``threading.Event`` a point
where generation stands still until it is set, an exception is raised from there, an ``End`` ends the completion with its reason.
"""

import itertools
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from minivllm_plugin.engine.sequence import FinishReason
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.serving.logprobs import Logprob
from minivllm_plugin.serving.outputs import CompletionOutput, StreamDelta


@dataclass(frozen=True)
class End:
    """A script step: the completion ends here, with this reason."""

    reason: str


@dataclass(frozen=True)
class Token:
    """A script step: a token and what the engine tells of its place, the chosen one first."""

    text: str
    logprobs: Mapping[int, Logprob]


Step = str | Token | threading.Event | Exception | End
REPLY: tuple[Step, ...] = ("Paris", " is", " the", " capital", " of", " France", ".")


class Completion:
    """One script being played."""

    def __init__(self, index: int, steps: Sequence[Step], params: SamplingParams) -> None:
        self.index = index
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[dict[int, Logprob]] = []
        self.finish_reason: str | None = None
        self._steps = iter(steps)
        self._params = params

    @property
    def output(self) -> CompletionOutput:
        told = None if self._params.logprobs is None else self.logprobs
        total = None if told is None else sum(next(iter(entry.values())).logprob for entry in told)
        reason = cast("FinishReason | None", self.finish_reason)  # scripts may end with nonsense, too
        return CompletionOutput(self.index, self.text, list(self.token_ids), reason, None, total, told)

    def advance(self) -> StreamDelta | threading.Event:
        """The next delta, or the event that has to be set first."""
        if self._params.max_tokens is not None and len(self.token_ids) >= self._params.max_tokens:
            return self._end("length")
        step = next(self._steps, None)
        if isinstance(step, threading.Event):
            if not step.is_set():
                self._steps = itertools.chain([step], self._steps)
                return step
            return self.advance()
        if isinstance(step, Exception):
            raise step
        if step is None:
            return self._end("stop")
        return self._end(step.reason) if isinstance(step, End) else self._take(step)

    def _take(self, step: str | Token) -> StreamDelta:
        number = len(self.token_ids) + 1
        token = Token(step, {number: Logprob(-0.5, 1, step)}) if isinstance(step, str) else step
        self.token_ids.append(number)
        self.text += token.text
        told = None if self._params.logprobs is None else [dict(token.logprobs)]
        self.logprobs += told or []
        for stop in self._params.stop or ():
            if stop in self.text:
                self.text = self.text[: self.text.index(stop)]
                return self._end("stop", (number,), told)
        return StreamDelta(token.text, (number,), index=self.index, logprobs=told)

    def _end(self, reason: str, tokens: tuple[int, ...] = (), told: list[dict[int, Logprob]] | None = None) -> StreamDelta:
        self.finish_reason = reason
        return StreamDelta("", tokens, cast("FinishReason", reason), index=self.index, logprobs=told)
