"""Steps that overlap: a batch is scheduled and launched while the one before it is still computed.

So the device has its next batch when it is done with one, and the host works meanwhile; one wait a step. A sequence's end is
seen one step late: it then stands in a batch for nothing, and what that computes for it is thrown away. Engine thread.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from minivllm_plugin.engine.hooks import Observer, StepTimes
from minivllm_plugin.engine.intake import Launched, is_scheduled
from minivllm_plugin.engine.progress import NOTHING, StepOutput, known_lengths, progress_of, stalled
from minivllm_plugin.engine.runner import AsyncRunner, PendingAnswers
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence

__all__ = ["Pipeline"]


@dataclass(slots=True)
class _Flight:
    """A batch from its scheduling to its tokens."""

    number: int  # of its scheduling
    batch: list[Sequence]
    is_prefill: bool
    num_tokens: int
    plan: object
    began: float
    schedule_seconds: float
    run_seconds: float = 0.0
    answers: PendingAnswers | None = None  # None: not launched yet
    launched: list[Launched | None] = field(default_factory=list)


class Pipeline:
    """Drives a scheduler and a runner with at most two batches under way.

    Args:
        scheduler, runner, clock: the engine's.
    """

    def __init__(self, scheduler: Scheduler, runner: AsyncRunner, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._clock = clock
        self._next: _Flight | None = None  # scheduled in the step before, and launched if that was possible

    def step(self, observer: Observer | None) -> StepOutput:
        """The results of one batch; see :meth:`minivllm_plugin.engine.llm_engine.LLMEngine.step`."""
        flight, self._next = self._next, None
        if flight is not None and flight.answers is None:
            flight = self._without_ended(flight, observer)
        if flight is None:
            flight = self._schedule(observer)
        if flight is None:
            if not self._scheduler.is_finished():
                raise stalled(self._scheduler)
            return NOTHING
        if observer is not None:
            observer.step_started(flight.plan)
        if flight.answers is None:
            self._launch(flight)
        if self._runner.can_launch(flight.batch):  # else the next batch could not begin before this one's tokens are known
            self._next = self._schedule(observer)
            if self._next is not None and self._runner.can_launch(self._next.batch):
                self._launch_ahead(self._next, observer)
        return self._settle(flight, observer)

    def _schedule(self, observer: Observer | None) -> _Flight | None:
        began = self._clock()
        batch, is_prefill = self._scheduler.schedule()
        if not batch:
            return None
        num_tokens = sum(seq.num_scheduled_tokens for seq in batch)
        plan = None if observer is None else observer.step_planned(batch)
        return _Flight(self._scheduler.num_steps, batch, is_prefill, num_tokens, plan, began, self._clock() - began)

    def _launch(self, flight: _Flight) -> None:
        began = self._clock()
        flight.answers = self._runner.launch(flight.batch, flight.is_prefill)
        flight.launched = self._scheduler.advance(flight.batch)
        flight.run_seconds = self._clock() - began

    def _launch_ahead(self, flight: _Flight, observer: Observer | None) -> None:
        try:
            self._launch(flight)
        except BaseException:
            if observer is not None:
                observer.launch_failed(flight.plan)
            raise

    def _settle(self, flight: _Flight, observer: Observer | None) -> StepOutput:
        assert flight.answers is not None
        began = self._clock()
        answers = flight.answers.wait()
        ran = self._clock()
        lengths = known_lengths(flight.batch)
        self._scheduler.settle(flight.launched, answers)
        progress = progress_of(flight.batch, lengths)
        if observer is not None:
            times = StepTimes(flight.began, flight.schedule_seconds, flight.run_seconds + ran - began, self._clock() - ran)
            finished = [seq for seq in flight.batch if seq.is_finished]
            observer.step_finished(finished, progress, flight.num_tokens, times)
        return StepOutput(tuple(flight.batch), flight.is_prefill, flight.num_tokens, progress, flight.number)

    @staticmethod
    def _without_ended(flight: _Flight, observer: Observer | None) -> _Flight | None:
        """A batch that waited for the tokens of the one before it, less those that ended with them; None if nobody is left."""
        batch = [seq for seq in flight.batch if is_scheduled(seq)]
        if len(batch) < len(flight.batch):
            flight.batch = batch
            flight.num_tokens = sum(seq.num_scheduled_tokens for seq in batch)
            if batch and observer is not None:
                flight.plan = observer.step_planned(batch)
        return flight if batch else None
