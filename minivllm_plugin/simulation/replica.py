"""One engine under a virtual clock: the real scheduler, steps that take as long as the cost model says, and no model.

A step begins at :attr:`Replica.now` with the requests that have arrived by then, and its tokens exist at its end. Nothing else
takes time. Steps in which every running request decodes and nothing can be decided otherwise may be leapt over
(:mod:`minivllm_plugin.simulation.leaping`); what comes out is the same to the last bit.
"""

import math
from array import array
from collections import deque
from functools import lru_cache

from minivllm_plugin.engine.hooks import StepTimes
from minivllm_plugin.engine.llm_engine import EngineStalledError, RequestProgress
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.errors import InvalidRequestError, RequestRejectedError
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.simulation.clock import Clock
from minivllm_plugin.simulation.content import synthetic
from minivllm_plugin.simulation.cost_model import CostFunction, StepWork
from minivllm_plugin.simulation.leaping import Leaper, checked_seconds
from minivllm_plugin.simulation.records import RequestRecord, Timeline
from minivllm_plugin.simulation.settings import Settings, attach_policies, build_scheduler
from minivllm_plugin.simulation.trace import Trace, TraceRequest

__all__ = ["Replica"]


class Replica:
    """Takes requests in the order of their arrival and runs them.

    Args:
        trace: whose requests it will get; sizes the pool.
        leap: leap over steps without decisions.
        record_tokens: keep the time of every token.
    """

    def __init__(
        self,
        settings: Settings,
        trace: Trace,
        cost: CostFunction,
        *,
        number: int = 0,
        leap: bool = True,
        record_tokens: bool = False,
    ) -> None:
        self.number = number
        self.scheduler = build_scheduler(settings, trace)
        self.timeline = Timeline()
        self.records: list[RequestRecord] = []
        self.finished: deque[RequestRecord] = deque()
        """In the order of their ends; a router reads and empties it."""
        self.num_leapt_steps = 0
        self._settings = settings
        self._block_tokens = trace.block_tokens
        self._clock = Clock()
        self._cost = cost
        self._record_tokens = record_tokens
        self._live: dict[str, tuple[Sequence, RequestRecord]] = {}
        self._starting: list[tuple[Sequence, RequestRecord]] = []  # scheduled, but without a token yet
        self._attached = attach_policies(self.scheduler, settings.policies, self._clock)
        self._leaper: Leaper | None = None
        if leap and self._attached.observer is None:
            self._leaper = Leaper(self.scheduler, self._attached, self._clock, cost, self.timeline)

    @property
    def now(self) -> float:
        """When the next step begins, if anybody is there."""
        return self._clock.now

    # --- requests ----------------------------------------------------------------------------------------------

    def submit(self, index: int, request: TraceRequest) -> RequestRecord:
        """Queue a request at its arrival; every step that began before it must have been run (:meth:`advance`)."""
        if self.scheduler.is_finished():
            self._clock.now = max(self.now, request.arrival)
        record, seq = self._make(index, request)
        self.records.append(record)
        limit = self._settings.max_queue_size
        if limit is not None and len(self.scheduler.waiting) >= limit + max(0, self._free_places()):
            record.rejected = "the waiting queue is full"
            return record
        try:
            if self._attached.before_queueing is not None:
                self._attached.before_queueing(seq)
            self.scheduler.add_sequence(seq)
        except REFUSALS as error:
            record.rejected = str(error)
            return record
        assert seq.request_id is not None
        self._live[seq.request_id] = (seq, record)
        if self._attached.observer is not None:
            self._attached.observer.request_queued(seq)
        return record

    def service(self) -> dict[str, int]:
        """Tokens that requests which have not ended were given so far, by tenant: prompt computed, and completion."""
        given: dict[str, int] = {}
        for seq, record in self._live.values():
            tokens = seq.num_tokens if seq.num_completion_tokens else seq.num_computed_tokens
            given[record.tenant] = given.get(record.tenant, 0) + tokens
        return given

    def _free_places(self) -> int:
        return self.scheduler.max_num_sequences - len(self.scheduler.running)

    def _make(self, index: int, request: TraceRequest) -> tuple[RequestRecord, Sequence]:
        size = self.scheduler.block_size
        whole = size if self._settings.whole_blocks and request.hash_ids else None
        tokens = request.tokens(index, self._block_tokens, whole)
        blocks = len(request.hash_ids) if whole else -(-len(tokens) // size)
        record = RequestRecord(index, request.arrival, len(tokens), blocks, request.output_tokens, request.tenant, self.number)
        if self._record_tokens:
            record.token_times = array("d")
        seq = Sequence([0], sampling_params=_exactly(request.output_tokens), request_id=str(index), priority=request.priority)
        seq.token_ids = tokens  # type: ignore[assignment]  # answers what the engine asks of a list of tokens
        seq.num_prompt_tokens = len(tokens)
        seq.arrival_time = request.arrival
        if request.tenant:
            seq.metadata = {"tenant": request.tenant}
        return record, seq

    # --- time --------------------------------------------------------------------------------------------------

    def advance(self, until: float = math.inf) -> None:
        """Run every step that begins before ``until``."""
        scheduler = self.scheduler
        while self.now < until and not scheduler.is_finished():
            leaper = self._leaper
            if leaper is None or not leaper.can_leap():
                self._step()
                continue
            leapt = leaper.leap(until, self._live if self._record_tokens else None)
            self.num_leapt_steps += leapt
            if not leapt:
                self._step()

    def _step(self) -> None:
        scheduler = self.scheduler
        leaper, observer = self._leaper, self._attached.observer
        batch, _ = scheduler.schedule()
        if not batch:
            waiting, running = len(scheduler.waiting), len(scheduler.running)
            raise EngineStalledError(f"{waiting} waiting and {running} running requests, but none can be scheduled")
        if leaper is not None:
            leaper.note_scheduled(batch)
        if observer is not None:
            observer.step_started(observer.step_planned(batch))
        work = StepWork.of(batch)
        num_tokens = work.num_prefill_tokens + work.num_decodes
        began, seconds = self.now, checked_seconds(self._cost, work)
        pool = scheduler.block_manager
        used = pool.num_blocks - pool.num_free_blocks
        self.timeline.add(began, seconds, used, len(scheduler.running), len(scheduler.waiting), num_tokens)
        for seq in scheduler.admitted:
            record = self._live[seq.request_id or ""][1]
            if record.scheduled is None:
                record.scheduled = began
                record.num_cached_tokens = seq.num_cached_tokens
                record.num_hit_blocks = seq.num_cached_tokens // pool.block_size
                self._starting.append((seq, record))
        self._clock.now += seconds
        lengths = [len(seq.token_ids) for seq in batch] if observer is not None or self._record_tokens else []
        scheduler.postprocess(batch, [synthetic(seq.token_ids).completion for seq in batch])
        self._take_in(batch, lengths, num_tokens, began, seconds)

    def _take_in(self, batch: list[Sequence], lengths: list[int], num_tokens: int, began: float, seconds: float) -> None:
        """Note first tokens and ends, and tell whoever listens."""
        if self._record_tokens:
            for seq, length in zip(batch, lengths, strict=True):
                times = self._live[seq.request_id or ""][1].token_times
                if times is not None and len(seq.token_ids) > length:
                    times.append(self.now)
        if self._starting:
            for seq, record in self._starting:
                if len(seq.token_ids) > seq.num_prompt_tokens:
                    record.first_token = self.now
            self._starting = [entry for entry in self._starting if entry[1].first_token is None]
        ended = [seq for seq in batch if seq.finish_reason is not None]
        for seq in ended:
            _, record = self._live.pop(seq.request_id or "")
            record.finished = self.now
            record.finish_reason = seq.finish_reason
            record.num_completion_tokens = seq.num_completion_tokens
            record.num_preemptions = seq.num_preemptions
            self.finished.append(record)
        observer = self._attached.observer
        if observer is not None:
            progress = [
                RequestProgress(seq.request_id or "", seq.last_token, seq.finish_reason, seq.stop_reason)
                for seq, length in zip(batch, lengths, strict=True)
                if len(seq.token_ids) > length
            ]
            observer.step_finished(ended, progress, num_tokens, StepTimes(began, 0.0, seconds, 0.0))


REFUSALS = (RequestRejectedError, InvalidRequestError)


@lru_cache(maxsize=4096)
def _exactly(num_tokens: int) -> SamplingParams:
    """So many tokens, whatever they are. The seed is there so that no sequence draws one."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, seed=0)
