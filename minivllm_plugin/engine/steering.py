"""Questions to policies, and the check of every answer: what comes back can be unfair, never incorrect.

Stands between the Scheduler, which asks, and whoever answers (the plugins room, or a test). Builds the records that
policies see; changes nothing but the order of the waiting queue and of the free queue's front. Engine thread.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from minivllm_plugin.engine.answers import block_ids, request_ids
from minivllm_plugin.engine.answers import budget as check_budget
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.views import EngineState, RequestView

if TYPE_CHECKING:
    from minivllm_plugin.engine.scheduler import Scheduler

__all__ = ["MAX_CHOSEN", "MAX_OVERTAKEN", "WAITING_WINDOW", "Policies", "Steering", "StepLimits", "engine_state", "request_view"]

logger = logging.getLogger(__name__)

WAITING_WINDOW = 64
MAX_OVERTAKEN = 64  # steps in which a request that waits longest is passed over in its life; from then on it goes first
MAX_CHOSEN = 16  # preemptions after which a policy's wish to put that request out once more is not heard
EVICTION_WINDOW = 4  # candidates per block needed
SMALLEST_EVICTION_WINDOW = 16

T = TypeVar("T")


class StepLimits(NamedTuple):
    """What one step may compute, in tokens, and how many may run."""

    num_tokens: int
    num_prefill_tokens: int
    num_sequences: int


class Policies(Protocol):
    """Who answers."""

    def answers(self, decision: str) -> bool:
        """Whether anybody has an answer to ``decision`` (``"order_waiting"``, …) at present."""
        ...

    def ask(self, decision: str, check: Callable[[Any], T], **arguments: Any) -> T | None:
        """The first answer that is not None, passed through ``check``; None when nobody has one or it is of no use.
        ``check`` raises TypeError or ValueError for an answer of the wrong shape."""
        ...

    def name_of(self, decision: str) -> str:
        """Who answers first, for messages."""
        ...

    def waiting_window(self) -> int:
        """How many waiting requests those who order them want to see."""
        ...


def engine_state(scheduler: "Scheduler", now: float) -> EngineState:
    """Queues, pool and limits at this moment."""
    pool = scheduler.block_manager
    return EngineState(
        scheduler.num_steps,
        now,
        len(scheduler.waiting),
        len(scheduler.running),
        pool.num_blocks,
        pool.num_free_blocks,
        pool.num_cached_blocks,
        pool.block_size,
        scheduler.max_num_sequences,
        scheduler.max_num_batched_tokens,
        scheduler.num_preemptions,
    )


def request_view(seq: Sequence, num_cached_tokens: int | None = None) -> RequestView:
    """One sequence as others may see it; ``num_cached_tokens`` is what the cache holds of one that waits."""
    return RequestView(
        seq.request_id or "",
        seq.arrival,
        seq.arrival_time,
        seq.priority,
        seq.num_prompt_tokens,
        len(seq.token_ids) - seq.num_prompt_tokens,
        seq.num_computed_tokens,
        seq.num_cached_tokens if num_cached_tokens is None else num_cached_tokens,
        seq.sampling_params.max_tokens,
        len(seq.block_table),
        seq.num_preemptions,
        seq.last_scheduled_step,
        seq.metadata,
    )


class Steering:
    """A Scheduler's decisions, handed to policies.

    Args:
        policies: who answers.
        clock: seconds; the ``now`` that policies see.
    """

    def __init__(self, policies: Policies, clock: Callable[[], float]) -> None:
        self._policies = policies
        self._clock = clock
        self._oldest: Sequence | None = None  # of those that wait
        self._num_preemptions = 0  # of the scheduler, when the oldest was last looked for
        self._has_reordered = False
        self._has_warned = False

    def limits(self, scheduler: "Scheduler", own: StepLimits) -> StepLimits:
        """``own``, lowered to what a policy allows; at least 1 of each, so that something always goes on."""
        if not self._policies.answers("step_budget"):
            return own
        budget = self._policies.ask("step_budget", check_budget, state=self._state(scheduler))
        if budget is None:
            return own
        asked = (budget.num_tokens, budget.num_prefill_tokens, budget.num_sequences)
        return StepLimits(*(most if value is None else min(max(value, 1), most) for value, most in zip(asked, own, strict=True)))

    def order_waiting(self, scheduler: "Scheduler") -> None:
        """Put the front of the waiting queue into the order that a policy wants, unless somebody was overtaken too often."""
        waiting = scheduler.waiting
        if not self._policies.answers("order_waiting"):
            if self._has_reordered:  # whoever did that was taken out since
                self._has_reordered = False
                scheduler.restore_order()
            return
        if len(waiting) < 2:
            return
        oldest = self._find_oldest(scheduler)
        if oldest.num_overtaken >= MAX_OVERTAKEN:
            self._warn_of_starvation(oldest)
            waiting.remove(oldest)
            waiting.appendleft(oldest)
            return
        window = list(islice(waiting, max(WAITING_WINDOW, self._policies.waiting_window())))
        pool = scheduler.block_manager
        views = tuple(request_view(seq, pool.count_cached_tokens(seq)) for seq in window)
        ids = self._policies.ask("order_waiting", request_ids, waiting=views, state=self._state(scheduler))
        if ids is not None and _reorder_front(waiting, window, ids):
            self._has_reordered = True

    def note_admitted(self, admitted: list[Sequence]) -> None:
        """Told after each admission, so that the overtaken are counted."""
        if self._oldest is None or not admitted:
            return
        if self._oldest in admitted:
            self._oldest = None
        else:
            self._oldest.num_overtaken += 1

    def victims(self, scheduler: "Scheduler", candidates: list[Sequence], needy: Sequence, num_blocks: int) -> list[Sequence]:
        """Whom a policy would preempt, first to go first; perhaps nobody. All of them are among ``candidates`` and ``needy``,
        and none was preempted too often already: it would be put out for ever."""
        if not self._policies.answers("select_victims"):
            return []
        choice = [*candidates, needy]
        views = tuple(map(request_view, choice))
        ids = self._policies.ask(
            "select_victims", request_ids, running=views, blocks_needed=num_blocks, state=self._state(scheduler)
        )
        by_id = {seq.request_id: seq for seq in choice if seq.num_preemptions < MAX_CHOSEN}
        return [by_id[request_id] for request_id in dict.fromkeys(ids or ()) if request_id in by_id]

    def evictor(self, scheduler: "Scheduler") -> Callable[[int], None]:
        """What the BlockManager calls before it takes that many blocks."""
        pool = scheduler.block_manager

        def prepare(num_needed: int) -> None:
            if not self._policies.answers("order_eviction"):
                return
            size = max(EVICTION_WINDOW * num_needed, SMALLEST_EVICTION_WINDOW)
            blank, candidates = pool.eviction_window(size)
            missing = num_needed - len(blank)
            ids: list[int] = []
            if missing > 0 and candidates:
                answer = self._policies.ask(
                    "order_eviction",
                    block_ids,
                    candidates=tuple(candidates),
                    num_needed=missing,
                    state=self._state(scheduler),
                )
                ids = [] if answer is None else answer
            known = {candidate.block_id for candidate in candidates}
            pool.move_to_front([*blank, *(block_id for block_id in dict.fromkeys(ids) if block_id in known)])

        return prepare

    def _state(self, scheduler: "Scheduler") -> EngineState:
        return engine_state(scheduler, self._clock())

    def _find_oldest(self, scheduler: "Scheduler") -> Sequence:
        """Of those that wait the one that came first. Looked for anew only when it left, or when somebody came back."""
        oldest = self._oldest
        if (
            oldest is None
            or scheduler.get(oldest.request_id or "") is not oldest
            or oldest.block_table
            or scheduler.num_preemptions != self._num_preemptions
        ):
            oldest = self._oldest = min(scheduler.waiting, key=lambda seq: seq.arrival)
            self._num_preemptions = scheduler.num_preemptions
        return oldest

    def _warn_of_starvation(self, oldest: Sequence) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "policy %r let request %r be overtaken in %d steps; it goes first now (said once)",
                self._policies.name_of("order_waiting"),
                oldest.request_id,
                MAX_OVERTAKEN,
            )


def _reorder_front(waiting: deque[Sequence], window: list[Sequence], ids: Iterable[str]) -> bool:
    """Put ``window``, the front of ``waiting``, into the order of ``ids``; whoever is not named follows in its old order.
    Returns whether that changed anything."""
    by_id = {seq.request_id: seq for seq in window}
    order = [by_id.pop(request_id) for request_id in dict.fromkeys(ids) if request_id in by_id]
    order += by_id.values()
    if order == window:
        return False
    for _ in window:
        waiting.popleft()
    waiting.extendleft(reversed(order))
    return True
