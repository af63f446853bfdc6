"""The requests of one engine as the hooks tell of them: live ones, and the outcomes of the last that ended. Any one thread.

Knows counts, states and ids; a request's text never comes here. A request id of the page's own making, ``chat-3-2``, is turn 2
of conversation ``chat-3``; of a synthetic user, ``guest-1-4``; any other id is its own conversation.
"""

import re
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from statistics import median

from minivllm_plugin.events import RequestOutcome, StepPlan, StepReport
from minivllm_plugin.views import RequestView

__all__ = ["LiveRequest", "RequestTable", "conversation_of", "label_of"]

OUTCOMES_KEPT = 256
RECENT = 64  # requests that the median time to first token looks at
WINDOW = 2.0  # seconds that throughput is averaged over

_OURS = re.compile(r"(chat|guest)-(\d+)-(\d+)")


def conversation_of(request_id: str) -> str:
    """``chat-3-2`` -> ``chat-3``."""
    match = _OURS.fullmatch(request_id)
    return f"{match[1]}-{match[2]}" if match else request_id


def label_of(request_id: str) -> str:
    """What people read: ``Chat 3``, ``Guest 1``, or a foreign id as it is, shortened."""
    match = _OURS.fullmatch(request_id)
    return f"{match[1].capitalize()} {match[2]}" if match else request_id[:24]


@dataclass(slots=True)
class LiveRequest:
    """One request that has not ended. Counts are tokens; times are seconds on the engine's clock.

    Attributes:
        slot: colour and letter on the page; freed when the request ends.
        num_computed: K/V that stand in its blocks, found ones included.
        num_cached: prompt tokens found in the prefix cache at its first admission.
    """

    request_id: str
    slot: int
    arrival: int
    arrival_time: float
    num_prompt: int
    state: str = "waiting"
    num_generated: int = 0
    num_computed: int = 0
    num_cached: int = 0
    num_preemptions: int = 0
    has_run: bool = False
    first_token_time: float | None = None

    @property
    def label(self) -> str:
        return label_of(self.request_id)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_generated


@dataclass
class RequestTable:
    """Requests by id.

    Attributes:
        queried, hit: prompt tokens of all admitted requests, and how many of them the prefix cache held.
    """

    live: dict[str, LiveRequest] = field(default_factory=dict)
    outcomes: "OrderedDict[str, RequestOutcome]" = field(default_factory=OrderedDict)
    queried: int = 0
    hit: int = 0
    num_preemptions: int = 0
    num_finished: int = 0
    _first_token_seconds: "deque[float]" = field(default_factory=lambda: deque(maxlen=RECENT))
    _generated: "deque[tuple[float, int]]" = field(default_factory=deque)

    # --- told ------------------------------------------------------------------------------------------------------

    def queued(self, request: RequestView) -> None:
        self.live[request.request_id] = LiveRequest(
            request.request_id, self._free_slot(), request.arrival, request.arrival_time, request.num_prompt_tokens
        )

    def planned(self, plan: StepPlan) -> None:
        for request_id in plan.preempted:
            if (one := self.live.get(request_id)) is not None:
                one.state, one.num_computed = "preempted", 0
                one.num_preemptions += 1
                self.num_preemptions += 1
        for request_id in plan.admitted:
            if (one := self.live.get(request_id)) is not None:
                one.has_run = True
                self.queried += one.num_prompt
        for request_id, num_tokens, is_prompt in zip(plan.request_ids, plan.num_tokens, plan.is_prompt, strict=True):
            if (one := self.live.get(request_id)) is not None:
                one.state = "prefill" if is_prompt else "decode"
                one.num_computed += num_tokens

    def found(self, request_id: str, num_tokens: int) -> None:
        """The prefix cache held this many of its tokens, at admission or when it came back."""
        if (one := self.live.get(request_id)) is None:
            return
        one.num_computed += num_tokens
        if not one.num_preemptions:
            one.num_cached = num_tokens
            self.hit += num_tokens

    def reported(self, report: StepReport) -> None:
        now = report.state.now
        for request_id in report.request_ids:
            if (one := self.live.get(request_id)) is not None:
                one.num_generated += 1
                if one.first_token_time is None:
                    one.first_token_time = now
                    self._first_token_seconds.append(now - one.arrival_time)
        self._generated.append((now, len(report.request_ids)))

    def ended(self, request: RequestView, outcome: RequestOutcome) -> LiveRequest | None:
        self.outcomes[request.request_id] = outcome
        while len(self.outcomes) > OUTCOMES_KEPT:
            self.outcomes.popitem(last=False)
        self.num_finished += 1
        return self.live.pop(request.request_id, None)

    # --- asked -----------------------------------------------------------------------------------------------------

    def slot_of(self, request_id: str) -> int:
        one = self.live.get(request_id)
        return one.slot if one is not None else 0

    def in_order(self) -> list[LiveRequest]:
        """Running ones by arrival, then those that wait, preempted ones first, as the engine queues them."""
        rank = {"prefill": 0, "decode": 0, "preempted": 1, "waiting": 2}
        return sorted(self.live.values(), key=lambda one: (rank[one.state], one.arrival))

    def num_ahead(self, request_id: str) -> int:
        """Requests that wait before this one."""
        waiting = [one.request_id for one in self.in_order() if one.state in ("waiting", "preempted")]
        return waiting.index(request_id) if request_id in waiting else 0

    def num_in(self, *states: str) -> int:
        return sum(1 for one in self.live.values() if one.state in states)

    def tokens_per_second(self, now: float) -> float:
        """Generated tokens of all requests over the last two seconds."""
        while self._generated and self._generated[0][0] < now - WINDOW:
            self._generated.popleft()
        return round(sum(count for _, count in self._generated) / WINDOW, 1)

    @property
    def median_first_token_seconds(self) -> float | None:
        """Of the last 64 requests, from queued to first token."""
        return median(self._first_token_seconds) if self._first_token_seconds else None

    @property
    def hit_rate(self) -> float | None:
        return self.hit / self.queried if self.queried else None

    def _free_slot(self) -> int:
        taken = {one.slot for one in self.live.values()}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)
