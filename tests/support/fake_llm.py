"""A scripted LLM with the API that the adapter uses, and nothing behind it. It counts, records and fails on request.

What it says are scripts (see ``fake_completion``). The consumer pulls, so every order of events in a test is the test's own;
completions of one request take turns. Records and parsers are the engine's own.
"""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fake_completion import REPLY, Completion, End, Step, Token

from minivllm_plugin.errors import EngineClosedError, ModelNotFoundError, RequestAbortedError, RequestTimeoutError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.parsing.chat_output import ChatOutputParser
from minivllm_plugin.parsing.formats import OutputFormats
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.serving.logprobs import Logprob
from minivllm_plugin.serving.outputs import RequestOutput, StreamDelta

__all__ = ["REPLY", "End", "FakeLLM", "FakeRegistry", "FakeStream", "Submission", "Token"]

PATIENCE = 30.0  # seconds before a test that waits for something gives up


@dataclass(frozen=True)
class Submission:
    """One request as the adapter sent it; ``choice``: of which completion a script is asked for."""

    prompt: Any
    chat: bool
    params: SamplingParams
    options: dict[str, Any]
    thread: str
    choice: int = 0


class FakeStream:
    def __init__(
        self, llm: "FakeLLM", request_id: str, prompt_token_ids: list[int], completions: list[Completion], submission: Submission
    ) -> None:
        self.request_id = request_id
        self.prompt_token_ids = prompt_token_ids
        self._llm = llm
        self._completions = completions
        self._open = list(completions)  # the one whose turn it is first
        self._params = submission.params
        timeout = submission.options["timeout"]
        self._expires = None if timeout is None else time.monotonic() + timeout

    @property
    def output(self) -> RequestOutput:
        told: list[dict[int, Logprob] | None] | None = None
        if self._params.prompt_logprobs is not None:
            told = [None, *({token: Logprob(-0.25, 1, f"p{token}")} for token in self.prompt_token_ids[1:])]
        return RequestOutput(
            self.request_id,
            None,
            self.prompt_token_ids,
            [completion.output for completion in self._completions],
            not self._open,
            self._llm.num_cached_tokens,
            prompt_logprobs=told,
        )

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
            for completion in self._open:
                completion.finish_reason = "abort"
            self._open = []

    async def aclose(self) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _checked(self) -> RequestOutput:
        if any(completion.finish_reason == "abort" for completion in self._completions):
            raise RequestAbortedError(f"request {self.request_id} was aborted")
        return self.output

    def _pull(self) -> StreamDelta | threading.Event:
        if not self._open:
            raise StopIteration
        if self._llm.closed:
            self._leave()
            raise EngineClosedError("the engine was closed")
        if self._expires is not None and time.monotonic() >= self._expires:
            self.close()
            raise RequestTimeoutError(f"request {self.request_id} ran past its timeout")
        completion = self._open[0]
        try:
            delta = completion.advance()
        except Exception:
            self._leave()
            raise
        if isinstance(delta, StreamDelta):
            self._open = self._open[1:] + ([] if completion.finish_reason else [completion])
            if not self._open:
                self._leave()
                self._llm.finished.append(self.request_id)
        return delta

    def _leave(self) -> None:
        self._llm.live.pop(self.request_id, None)
        self._open = []


class FakeLLM:
    """Attributes for tests: ``submissions`` (attempts included), ``live`` ids, ``finished`` and ``aborted`` ids, ``refusals``;
    ``tool_format``, ``reasoning_format`` and ``opens_reasoning`` (the template ends with the opening tag) choose the parsers."""

    def __init__(self, steps: Sequence[Step] = REPLY, *, max_model_len: int = 128, num_cached_tokens: int = 3) -> None:
        self.steps: Sequence[Step] | Callable[[Submission], Sequence[Step]] = steps
        self.max_model_len = max_model_len
        self.num_cached_tokens = num_cached_tokens
        self.tool_format = "hermes"
        self.reasoning_format = "none"
        self.opens_reasoning = False
        self.tokenizer = None
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

    def output_parser(
        self, tools: Sequence[Mapping[str, Any]] = (), *, prompt_token_ids: Sequence[int] = (), reasoning: bool = True
    ) -> ChatOutputParser:
        formats = OutputFormats(
            Extensions.builtin().parsers,
            tool_call_parser=self.tool_format,
            reasoning_parser=self.reasoning_format,
            chat_template=None,
        )
        names = [tool["function"]["name"] for tool in tools]
        return ChatOutputParser(
            formats.reasoning_parser("<think>" if self.opens_reasoning else "", None) if reasoning else None,
            formats.tool_parser(names, None) if names else None,
        )

    def submit(self, prompt: Any, params: SamplingParams, **options: Any) -> FakeStream:
        ids = list(prompt) if isinstance(prompt, list) else list(range(len(prompt.split())))
        return self._admit(Submission(prompt, False, params, options, threading.current_thread().name), ids)

    def submit_chat(self, messages: Any, params: SamplingParams, **options: Any) -> FakeStream:
        ids = list(range(sum(1 + len(str(m.get("content")).split()) for m in messages)))
        return self._admit(Submission(messages, True, params, options, threading.current_thread().name), ids)

    def submit_embedding(self, prompt: Any, **options: Any) -> Any:
        """Refused like anything else, and never answered: scripts make text."""
        raise self.refusals.pop(0)

    def _admit(self, submission: Submission, prompt_token_ids: list[int]) -> FakeStream:
        self.submissions.append(submission)
        if self.refusals:
            raise self.refusals.pop(0)
        request_id = submission.options["request_id"] or f"request-{next(self._ids)}"
        self.live[request_id] = request_id
        params = submission.params
        completions = [
            Completion(index, self.steps(replace(submission, choice=index)) if callable(self.steps) else self.steps, params)
            for index in range(params.n)
        ]
        return FakeStream(self, request_id, prompt_token_ids, completions, submission)


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
