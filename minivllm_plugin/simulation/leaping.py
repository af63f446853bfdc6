"""Over steps in which nothing can be decided otherwise: every running request decodes; nobody arrives, enters, ends, makes room.

What such a step changes is known beforehand: a token more for everyone, and now and then a block taken or entered into the
prefix index. Blocks are still taken and entered by the BlockManager itself, one by one and in the order of the steps; lengths
are set once at the end. Times are added up step by step, so that they are equal to stepping to the last bit.

Why nobody is missed. Who waits is admitted only when a place or blocks become free, and both only shrink while everyone decodes:
with every place taken nobody enters at all; with places left, the head of the queue was refused in the last real step, and the
leap ends before the first change of the pool. A leap also ends before a step that ends somebody, before one that needs more
blocks than are free, and at the next arrival. Policies that are asked in such steps, and observers, forbid leaping.
"""

import math
from array import array
from collections import defaultdict
from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC

from minivllm_plugin.engine.order import Order
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation.clock import Clock
from minivllm_plugin.simulation.content import synthetic
from minivllm_plugin.simulation.cost_model import CostFunction, StepWork
from minivllm_plugin.simulation.records import RequestRecord, Timeline
from minivllm_plugin.simulation.settings import Attached

__all__ = ["Leaper", "checked_seconds"]

Live = Mapping[str, tuple[Sequence, RequestRecord]]


class Leaper:
    """Leaps with one scheduler. The replica calls :meth:`note_scheduled` after every real ``schedule()``."""

    def __init__(self, scheduler: Scheduler, attached: Attached, clock: Clock, cost: CostFunction, timeline: Timeline) -> None:
        self._scheduler = scheduler
        self._attached = attached
        self._clock = clock
        self._cost = cost
        self._timeline = timeline
        self._order = Order(scheduler.policy)
        self._refused: tuple[int, ...] | None = None

    def note_scheduled(self, batch: SequenceABC[Sequence]) -> None:
        """Remember in which state of queues and pool the head of ``waiting`` was refused, if it was asked at all."""
        scheduler = self._scheduler
        self._refused = None
        was_asked = bool(scheduler.waiting) and not scheduler.admitted and not scheduler.preempted
        # A step with a longer row may have had no budget left to ask with.
        if was_asked and len(batch) == len(scheduler.running) and all(seq.num_scheduled_tokens == 1 for seq in batch):
            self._refused = self._state()

    def can_leap(self) -> bool:
        """Whether the next step, were it run, would only decode."""
        scheduler, decisions = self._scheduler, self._attached.decisions
        running = scheduler.running
        if not running or len(running) > scheduler.max_num_batched_tokens or "step_budget" in decisions:
            return False
        if self._is_waiting_for_room() and ("order_waiting" in decisions or self._refused != self._state()):
            return False
        for seq in reversed(running):  # who came last is the likeliest to be prefilling still
            computed = seq.num_computed_tokens
            if computed < seq.num_prompt_tokens or len(seq.token_ids) - computed != 1:
                return False
        return True

    def leap(self, until: float, live: Live | None = None) -> int:
        """Go as far as nothing is decided, at most over the steps that begin before ``until``; returns how many that were.

        Args:
            live: id -> record of every request whose token times are kept.
        """
        scheduler, clock, timeline = self._scheduler, self._clock, self._timeline
        pool, running = scheduler.block_manager, list(scheduler.running)
        size, waiting, num = pool.block_size, len(scheduler.waiting), len(running)
        lengths = [len(seq.token_ids) for seq in running]
        longest = pool.num_blocks * size + 1  # the engine ends a sequence that has outgrown the pool
        ends = (
            min(seq.num_prompt_tokens + (seq.sampling_params.max_tokens or longest), longest) - length
            for seq, length in zip(running, lengths, strict=True)
        )
        most = min(ends) - 1
        first_change = min(
            min(len(seq.block_table) * size - length + 2, size - (length - 1) % size)
            for seq, length in zip(running, lengths, strict=True)
        )
        stops = array("d") if live is not None else None
        changes: _Changes | None = None
        context = sum(lengths)
        used = pool.num_blocks - pool.num_free_blocks
        done = 0
        while done < most and clock.now < until:
            if done + 1 >= first_change:
                if changes is None:
                    if self._is_waiting_for_room():
                        break
                    changes = _Changes(self._order.turns(running), size, pool.enable_prefix_caching, done)
                takes = changes.takes.get(done + 1)
                if takes is not None and len(takes) > pool.num_free_blocks:
                    break
                scheduler.num_steps += 1
                if takes is not None:
                    for seq in changes.take(done + 1):
                        pool.append(seq)
                    used = pool.num_blocks - pool.num_free_blocks
            else:
                scheduler.num_steps += 1
            seconds = checked_seconds(self._cost, StepWork(0, num, context, 0))
            timeline.add(clock.now, seconds, used, num, waiting, num)
            clock.now += seconds
            done += 1
            context += num
            if stops is not None:
                stops.append(clock.now)
            if changes is not None and done in changes.fills:
                for seq in changes.fill(done):
                    pool.commit(seq)
        if done:
            self._settle(running, lengths, done, stops, live)
        return done

    def _settle(
        self, running: list[Sequence], lengths: list[int], done: int, stops: "array[float] | None", live: Live | None
    ) -> None:
        """Set what ``done`` steps have made of every sequence. Turns need no change: everyone had one in every step."""
        for seq, length in zip(running, lengths, strict=True):
            synthetic(seq.token_ids).grow_to(length + done)
            seq.num_computed_tokens = length - 1 + done
            seq.last_scheduled_step = self._scheduler.num_steps
            if live is not None and stops is not None:
                times = live[seq.request_id or ""][1].token_times
                assert times is not None
                times.extend(stops)

    def _is_waiting_for_room(self) -> bool:
        return bool(self._scheduler.waiting) and len(self._scheduler.running) < self._scheduler.max_num_sequences

    def _state(self) -> tuple[int, ...]:
        scheduler = self._scheduler
        pool = scheduler.block_manager
        return len(scheduler.waiting), len(scheduler.running), pool.num_free_blocks, pool.statistics.stored_blocks


class _Changes:
    """In which steps of a leap, counted from 1, which sequences need a block or fill one.

    Args:
        turns: all that run, in the order of their turns.
        done: steps since the lengths of ``turns`` were set.

    Attributes:
        takes, fills: step -> places in ``turns`` of those who need a block at its start, or have filled one at its end.
    """

    def __init__(self, turns: list[Sequence], size: int, commits: bool, done: int) -> None:
        self._turns = turns
        self._lengths = [len(seq.token_ids) for seq in turns]
        self._size = size
        self.takes: defaultdict[int, list[int]] = defaultdict(list)
        self.fills: defaultdict[int, list[int]] = defaultdict(list)
        for place, (seq, length) in enumerate(zip(turns, self._lengths, strict=True)):
            self.takes[len(seq.block_table) * size - length + 2].append(place)
            if commits:
                first = size - (length - 1) % size
                self.fills[first + max(0, -(-(done + 1 - first) // size)) * size].append(place)

    def take(self, step: int) -> list[Sequence]:
        """Who needs a block at the start of ``step``, with its length set."""
        found = []
        for place in sorted(self.takes.pop(step)):
            seq = self._turns[place]
            synthetic(seq.token_ids).grow_to(self._lengths[place] + step - 1)
            self.takes[step + self._size].append(place)
            found.append(seq)
        return found

    def fill(self, step: int) -> list[Sequence]:
        """Who has filled a block at the end of ``step``, with what is computed set."""
        found = []
        for place in sorted(self.fills.pop(step)):
            seq = self._turns[place]
            length = self._lengths[place]
            synthetic(seq.token_ids).grow_to(length + step - 1)
            seq.num_computed_tokens = length - 1 + step
            self.fills[step + self._size].append(place)
            found.append(seq)
        return found


def checked_seconds(cost: CostFunction, work: StepWork) -> float:
    """What the cost model says.

    Raises:
        ConfigError: no finite time greater than 0.
    """
    seconds = cost(work)
    if not 0 < seconds < math.inf:
        raise ConfigError(f"the cost model says {seconds!r} seconds for {work}; a step takes a finite time greater than 0")
    return seconds
