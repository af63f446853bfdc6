"""A scripted LLM with the API that the adapter uses, and nothing behind it. It counts, records and fails on request.

One script step is one token: a ``str`` is its text, a ``threading.Event`` a point where generation stands still until it is
set, an exception is raised from there, an ``End`` ends the request with its reason. The consumer pulls, so every order of
events in a test is the test's own.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm_plugin.errors import EngineClosedError, ModelNotFoundError, RequestAbortedError, RequestTimeoutError
from minivllm_plugin.sampling_parameters import SamplingParams


@dataclass(frozen=True)
class End:
    """A script step: the request ends here, with this reason."""

    reason: str


Step = str | threading.Event | Exception | End
REPLY: tuple[Step, ...] = ("Paris", " is", " the", " capital", " of", " France", ".")
PATIENCE = 30.0  # seconds before a test that waits for something gives up


@dataclass(frozen=True)
class StreamDelta:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class CompletionOutput:
    index: int = 0
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=lambda: [CompletionOutput()])
    finished: bool = False
    num_cached_tokens: int = 0


@dataclass(frozen=True)
class Submission:
    """One request as the adapter sent it."""

    prompt: Any
    chat: bool
    params: SamplingParams
    options: dict[str, Any]
    thread: str


class FakeStream:
    def __init__(
        self, llm: "FakeLLM", output: RequestOutput, steps: Sequence[Step], params: SamplingParams, timeout: Any
    ) -> None:
        self.request_id = output.request_id
        self.prompt_token_ids = output.prompt_token_ids
        self.output = output
        self._llm = llm
        self._steps = iter(steps)
        self._params = params
        self._expires = None if timeout is None else time.monotonic() + timeout

    def __iter__(self) -> Iterator[StreamDelta]:
        return self

    def __next__(self) -> StreamDelta:
        while True:
            delta = self._pull()
            if isinstance(delta, StreamDelta):
                return delta
            delta.wait(0.002)

    def __aiter__(self) -> AsyncIterator[StreamDelta]:
        return self

    async def __anext__(self) -> StreamDelta:
        try:
            while True:
                delta = self._pull()
                if isinstance(delta, StreamDelta):
                    return delta
                await asyncio.sleep(0.002)
        except StopIteration:
            raise StopAsyncIteration from None
        except BaseException:
            self.close()
            raise

    def result(self) -> RequestOutput:
        for _ in self:
            pass
        return self._checked()

    async def aresult(self) -> RequestOutput:
        async for _ in self:
            pass
        return self._checked()

    def close(self) -> None:
        if self._llm.live.pop(self.request_id, None) is not None:
            self._llm.aborted.append(self.request_id)
            self.output.outputs[0].finish_reason = "abort"
            self.output.finished = True

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _checked(self) -> RequestOutput:
        if self.output.outputs[0].finish_reason == "abort":
            raise RequestAbortedError(f"request {self.request_id} was aborted")
        return self.output

    def _pull(self) -> StreamDelta | threading.Event:
        """The next delta, or the event that has to be set first."""
        if self.output.finished:
            raise StopIteration
        if self._llm.closed:
            self._leave()
            raise EngineClosedError("the engine was closed")
        if self._expires is not None and time.monotonic() >= self._expires:
            self.close()
            raise RequestTimeoutError(f"request {self.request_id} ran past its timeout")
        completion = self.output.outputs[0]
        if self._params.max_tokens is not None and len(completion.token_ids) >= self._params.max_tokens:
            return self._end("length")
        step = next(self._steps, None)
        if isinstance(step, threading.Event):
            if not step.is_set():
                self._steps = itertools.chain([step], self._steps)
                return step
            return self._pull()
        if isinstance(step, Exception):
            self._leave()
            raise step
        if step is None:
            return self._end("stop")
        if isinstance(step, End):
            return self._end(step.reason)
        token = (len(completion.token_ids) + 1,)
        completion.token_ids += token
        completion.text += step
        for stop in self._params.stop or ():
            if stop in completion.text:
                completion.text = completion.text[: completion.text.index(stop)]
                return self._end("stop", token_ids=token)
        return StreamDelta(step, token)

    def _end(self, reason: str, token_ids: tuple[int, ...] = ()) -> StreamDelta:
        self.output.outputs[0].finish_reason = reason
        self._leave()
        self._llm.finished.append(self.request_id)
        return StreamDelta("", token_ids, reason)

    def _leave(self) -> None:
        self._llm.live.pop(self.request_id, None)
        self.output.finished = True


class FakeLLM:
    """Attributes for tests: ``submissions`` (attempts included), ``live`` ids, ``finished`` and ``aborted`` ids, ``refusals``."""

    def __init__(self, steps: Sequence[Step] = REPLY, *, max_model_len: int = 128, num_cached_tokens: int = 3) -> None:
        self.steps: Sequence[Step] | Callable[[Submission], Sequence[Step]] = steps
        self.max_model_len = max_model_len
        self.num_cached_tokens = num_cached_tokens
        self.submissions: list[Submission] = []
        self.refusals: list[Exception] = []  # raised by the next submits, first one first
        self.live: dict[str, str] = {}
        self.finished: list[str] = []
        self.aborted: list[str] = []
        self.closed = False
        self.is_healthy = True
        self._ids = itertools.count()

    def default_sampling_params(self) -> SamplingParams:
        return SamplingParams(temperature=0.7, max_tokens=None)

    def submit(self, prompt: Any, params: SamplingParams, **options: Any) -> FakeStream:
        ids = list(prompt) if isinstance(prompt, list) else list(range(len(prompt.split())))
        return self._admit(Submission(prompt, False, params, options, threading.current_thread().name), ids)

    def submit_chat(self, messages: Any, params: SamplingParams, **options: Any) -> FakeStream:
        ids = list(range(sum(1 + len(str(m["content"]).split()) for m in messages)))
        return self._admit(Submission(messages, True, params, options, threading.current_thread().name), ids)

    def _admit(self, submission: Submission, prompt_token_ids: list[int]) -> FakeStream:
        self.submissions.append(submission)
        if self.refusals:
            raise self.refusals.pop(0)
        request_id = submission.options["request_id"] or f"request-{next(self._ids)}"
        self.live[request_id] = request_id
        steps = self.steps(submission) if callable(self.steps) else self.steps
        output = RequestOutput(request_id, prompt_token_ids, num_cached_tokens=self.num_cached_tokens)
        return FakeStream(self, output, steps, submission.params, submission.options["timeout"])


class FakeRegistry:
    """Engines by name. ``gate`` holds every load until it is set; ``load_error`` makes loads fail."""

    def __init__(self, **llms: FakeLLM) -> None:
        self.llms: dict[str, FakeLLM] = dict(llms)
        self.gate = threading.Event()
        self.gate.set()
        self.load_error: BaseException | None = None
        self.load_threads: list[str] = []
        self._loaded: dict[str, FakeLLM] = {}

    def get_llm(self, name: str) -> FakeLLM:
        self.load_threads.append(threading.current_thread().name)
        assert self.gate.wait(PATIENCE)
        if self.load_error is not None:
            raise self.load_error
        if name not in self.llms:
            raise ModelNotFoundError(f"no model named {name!r}; see `minivllm models`")
        return self._loaded.setdefault(name, self.llms[name])

    def loaded(self) -> dict[str, FakeLLM]:
        return dict(self._loaded)
