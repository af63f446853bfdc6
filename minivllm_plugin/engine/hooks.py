"""What the engine tells and asks plugins, as the engine sees them: protocols only. The plugins room implements them.

With no plugin there is no object behind these, and a step pays a few comparisons with None.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING, NamedTuple, Protocol

from minivllm_plugin.engine.sequence import Sequence

if TYPE_CHECKING:
    from minivllm_plugin.engine.llm_engine import RequestProgress
    from minivllm_plugin.engine.scheduler import Scheduler

__all__ = ["Hooks", "Observer", "StepTimes"]


class StepTimes(NamedTuple):
    """When a step began on the engine's clock, and how long its parts took, in seconds."""

    began: float
    schedule: float
    run: float
    postprocess: float


class Observer(Protocol):
    """Told what happened, on the engine thread."""

    def request_queued(self, seq: Sequence) -> None: ...

    def step_planned(self, batch: SequenceABC[Sequence]) -> object:
        """A batch was scheduled just now. What is returned is handed to :meth:`step_started` when its turn comes, which is after
        the end of the step before, though it may be launched earlier. Asked again where some of the batch ended before it was
        launched; where all of it did, no :meth:`step_started` follows."""
        ...

    def step_started(self, plan: object) -> None: ...

    def launch_failed(self, plan: object) -> None:
        """The batch of this plan failed as it was launched, in the midst of the step before it."""
        ...

    def step_finished(
        self,
        finished: SequenceABC[Sequence],
        progress: SequenceABC["RequestProgress"],
        num_tokens: int,
        times: StepTimes,
    ) -> None:
        """``finished``: of the batch. One that was aborted while the runner ran is among them, but not in ``progress``."""
        ...

    def request_aborted(self, seq: Sequence) -> None: ...


class Hooks(Protocol):
    """The plugins of one engine."""

    @property
    def is_calling(self) -> bool:
        """Whether plugin code is running on this thread right now."""
        ...

    def attach(self, scheduler: "Scheduler", clock: Callable[[], float]) -> Observer | None:
        """Steer ``scheduler`` if a policy is named; return who wants to be told, if anybody does."""
        ...

    def before_queueing(self, seq: Sequence) -> None:
        """Ask policies whether ``seq`` may queue, and with which cache salt.

        Raises:
            RequestRejectedError: it may not.
        """
        ...
