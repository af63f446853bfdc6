"""What happened, as short sentences for the event strip: who came, shared, was pushed out, came back, ended. Any one thread.

Written from records only, so it can hold no prompt. A line names requests by their label and slot.
"""

import itertools
import time
from collections import deque
from dataclasses import asdict, dataclass

from minivllm_ui.request_table import LiveRequest

__all__ = ["Event", "Story"]

LINES_KEPT = 300
OVERWRITING_EVERY = 2.0  # seconds between two lines about it


@dataclass(frozen=True, slots=True)
class Event:
    """One line.

    Attributes:
        number: counts up; a page that saw number 7 wants those above it.
        time: seconds since the epoch.
        kind: ``admitted``, ``shared``, ``preempted``, ``resumed``, ``evicted``, ``finished``, ``stopped``, ``engine``.
        slot: of the request it is about; -1 for none.
    """

    number: int
    time: float
    kind: str
    text: str
    request_id: str = ""
    slot: int = -1


class Story:
    """The last lines, oldest first."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque(maxlen=LINES_KEPT)
        self._numbers = itertools.count(1)
        self._overwritten = 0
        self._told_of_overwriting = 0.0

    def last(self, most: int) -> list[dict[str, object]]:
        events = self._events
        return [asdict(events[index]) for index in range(max(0, len(events) - most), len(events))]

    def tell(self, kind: str, text: str, about: LiveRequest | None = None) -> None:
        identity, slot = (about.request_id, about.slot) if about is not None else ("", -1)
        self._events.append(Event(next(self._numbers), round(time.time(), 2), kind, text, identity, slot))

    # --- the sentences ---------------------------------------------------------------------------------------------

    def admitted(self, one: LiveRequest, with_whom: list[str], num_blocks: int) -> None:
        if not num_blocks:
            self.tell("admitted", f"{one.label} starts: {one.num_prompt} prompt tokens to compute", one)
        elif with_whom:
            others = with_whom[0] if len(with_whom) == 1 else f"{with_whom[0]} and {len(with_whom) - 1} more"
            self.tell("shared", f"{one.label} starts like {others}: {_blocks(num_blocks)} shared, not computed again", one)
        else:
            self.tell("shared", f"{one.label} finds {_blocks(num_blocks)} still in the cache and reuses them", one)

    def preempted(self, one: LiveRequest, num_blocks: int) -> None:
        self.tell("preempted", f"Pool full: {one.label} gives up its {_blocks(num_blocks)} and waits", one)

    def resumed(self, one: LiveRequest, num_blocks: int) -> None:
        found = f"{_blocks(num_blocks)} were still there" if num_blocks else "all of it is computed again"
        self.tell("resumed", f"{one.label} is back: {found}", one)

    def evicted(self, num_blocks: int) -> None:
        """In a full pool every block taken is one of these, so they are told of together."""
        self._overwritten += num_blocks
        if time.monotonic() - self._told_of_overwriting > OVERWRITING_EVERY:
            self.tell("evicted", f"Nothing is free: {_blocks(self._overwritten)} of ended conversations used anew")
            self._overwritten, self._told_of_overwriting = 0, time.monotonic()

    def ended(self, one: LiveRequest, reason: str, num_kept: int) -> None:
        kept = f"{_blocks(num_kept)} stay reusable" if num_kept else "its blocks are free"
        if reason == "abort":
            self.tell("stopped", f"{one.label} was stopped: {kept}", one)
        elif reason == "error":
            self.tell("stopped", f"{one.label} failed: {kept}", one)
        else:
            self.tell("finished", f"{one.label} is done after {one.num_generated} tokens: {kept}", one)


def _blocks(count: int) -> str:
    return "1 block" if count == 1 else f"{count} blocks"
