"""What the engine thread remembers of unfinished requests: who asked, which sequences work on it, who is to be told.

A request with ``n`` > 1 is several sequences. The first one runs alone until its prompt is computed; the others then find the
prompt's blocks in the prefix cache and share them. Engine thread only.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from minivllm_plugin.engine.llm_engine import LLMEngine, RequestProgress, StepOutput
from minivllm_plugin.engine.sequence import Pooling, Sequence
from minivllm_plugin.errors import (
    EngineError,
    InvalidRequestError,
    RequestFailedError,
    RequestRejectedError,
    RequestTimeoutError,
)
from minivllm_plugin.sampling_parameters import MAX_SEED, SamplingParams
from minivllm_plugin.serving.outbox import Ended, Failed, Outbox

__all__ = ["LiveRequests", "Request", "choice_id"]


@dataclass(frozen=True, slots=True)
class Request:
    """One accepted request on its way to the engine. ``deadline`` is on ``time.monotonic()``'s clock."""

    request_id: str
    token_ids: list[int]
    params: SamplingParams
    outbox: Outbox
    priority: int = 0
    cache_salt: str | None = None
    deadline: float | None = None
    metadata: Mapping[str, Any] | None = None
    pooling: Pooling | None = None


@dataclass(slots=True)
class _Live:
    """One request with its sequences that have not ended, by choice; ``held``: choices that wait for the first one's prompt."""

    request: Request
    sequences: dict[int, Sequence] = field(default_factory=dict)
    held: list[int] = field(default_factory=list)

    def note(self, **moments: float | int) -> None:
        outbox = self.request.outbox
        outbox.metrics = replace(outbox.metrics, **moments)  # type: ignore[arg-type]  # field names are checked by replace


def choice_id(request_id: str, choice: int) -> str:
    """The id under which the engine and its plugins know one completion of a request."""
    return request_id if choice == 0 else f"{request_id}/choice-{choice}"


class LiveRequests:
    """Unfinished requests of one engine.

    Args:
        engine: takes the prompts.
        release: told the id of each request that is over.
    """

    def __init__(self, engine: LLMEngine, release: Callable[[str], None]) -> None:
        self._engine = engine
        self._release = release
        self._live: dict[str, _Live] = {}
        self._choices: dict[str, tuple[_Live, int]] = {}  # id of a sequence -> whose it is

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter([entry.request for entry in self._live.values()])

    # --- in ----------------------------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Hand ``request`` to the engine; a refusal goes to its reader."""
        entry = _Live(request, held=list(range(1, request.params.n)))
        self._live[request.request_id] = entry
        self._start(entry, 0)

    def _start(self, entry: _Live, choice: int) -> None:
        request = entry.request
        identity = choice_id(request.request_id, choice)
        try:
            sequence = self._engine.add_prompt(
                request.token_ids,
                _params_of(request.params, choice),
                request_id=identity,
                priority=request.priority,
                cache_salt=request.cache_salt,
                metadata=request.metadata,
                pooling=request.pooling,
            )
        except (InvalidRequestError, RequestRejectedError) as error:
            self._fail(entry, error)
            return
        entry.sequences[choice] = sequence
        self._choices[identity] = entry, choice

    # --- a step is over ----------------------------------------------------------------------------------------------

    def deliver(self, output: StepOutput, started: float) -> None:
        """Put what a step produced into the outboxes. ``started``: of the step, on ``time.time()``'s clock."""
        for sequence in output.batch:
            if sequence.first_scheduled_step != output.number:
                continue
            entry, choice = self._choices.get(sequence.request_id or "", (None, 0))
            if entry is not None and choice == 0:  # the others find what the first one computed: nothing was cached before
                entry.note(first_scheduled_time=started)
                entry.request.outbox.num_cached_tokens = sequence.prompt_cached_tokens or 0
        for progress in output.progress:
            found = self._choices.get(progress.request_id)
            if found is None:  # its request failed with a sibling, in this very step
                continue
            entry, choice = found
            if choice == 0 and entry.held and progress.finish_reason != "error":
                self._start_held(entry)  # before its own end is noted, or the request would be over
                if progress.request_id not in self._choices:
                    continue
            if progress.token_id is not None and entry.request.outbox.metrics.first_token_time is None:
                entry.note(first_token_time=time.time())
            if progress.finish_reason is None:
                entry.request.outbox.put(progress)
            else:
                self._finish(entry, choice, progress)

    def _start_held(self, entry: _Live) -> None:
        held, entry.held = entry.held, []
        for choice in held:
            if entry.request.request_id in self._live:  # until one of them was refused
                self._start(entry, choice)

    def expire(self) -> None:
        """Abort the requests whose deadline has passed."""
        now = time.monotonic()
        late = [entry for entry in self._live.values() if entry.request.deadline is not None and entry.request.deadline <= now]
        for entry in late:
            error = RequestTimeoutError(f"request {entry.request.request_id!r} did not end before its deadline")
            self._fail(entry, error)

    # --- out ---------------------------------------------------------------------------------------------------------

    def abort(self, request_id: str, request: Request | None = None, choice: int | None = None) -> None:
        """End a request, or one of its choices. With ``request`` only if it is this one: its id may have been taken again."""
        entry = self._live.get(request_id)
        if entry is None or request not in (None, entry.request):
            return
        chosen = [*entry.sequences, *entry.held] if choice is None else [choice]
        for one in chosen:
            identity = choice_id(request_id, one)
            if one in entry.held:
                entry.held.remove(one)
            elif one in entry.sequences:
                self._engine.abort(identity)
            else:
                continue
            self._finish(entry, one, RequestProgress(identity, None, "abort", None))

    def abort_all(self) -> None:
        """Take every sequence out of the engine, so that observers hear of every end; readers are told by :meth:`fail_all`."""
        for identity in list(self._choices):
            self._engine.abort(identity)

    def fail_all(self, error: Callable[[], EngineError]) -> None:
        """Fail every reader, each with an exception of their own: a traceback is written into it where it is raised."""
        for entry in self._live.values():
            entry.request.outbox.put(Failed(error()))
        self._live.clear()
        self._choices.clear()

    def _finish(self, entry: _Live, choice: int, progress: RequestProgress) -> None:
        sequence = entry.sequences.pop(choice, None)
        self._choices.pop(progress.request_id, None)
        preemptions = entry.request.outbox.metrics.num_preemptions + (sequence.num_preemptions if sequence else 0)
        entry.note(finished_time=time.time(), num_preemptions=preemptions)
        if progress.finish_reason == "error":
            cause = (sequence.failure if sequence else None) or "its logits were not finite (NaN, or everything masked)"
            self._fail(entry, RequestFailedError(f"request {progress.request_id!r} failed: {cause}"))
            return
        if not entry.sequences and not entry.held:
            self._forget(entry)
        entry.request.outbox.put(Ended(progress))

    def _fail(self, entry: _Live, error: Exception) -> None:
        for choice in list(entry.sequences):
            identity = choice_id(entry.request.request_id, choice)
            self._engine.abort(identity)
            self._choices.pop(identity, None)
        entry.sequences.clear()
        entry.held.clear()
        self._forget(entry)
        entry.request.outbox.put(Failed(error))

    def _forget(self, entry: _Live) -> None:
        del self._live[entry.request.request_id]
        self._release(entry.request.request_id)


def _params_of(params: SamplingParams, choice: int) -> SamplingParams:
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + choice) % (MAX_SEED + 1)
    prompt_logprobs = params.prompt_logprobs if choice == 0 else None
    return params.replace(n=1, seed=seed, prompt_logprobs=prompt_logprobs)
