"""Policies of one engine, in the order in which they were named: who is asked, and what happens when one fails.

The scheduler's side (records, checks) is :mod:`minivllm_plugin.engine.steering`. Engine thread.
"""

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from minivllm_plugin.engine.sequence import Sequence as EngineSequence
from minivllm_plugin.errors import RequestRejectedError
from minivllm_plugin.plugins.calls import HookCall
from minivllm_plugin.views import Admit, EngineState, Reject, RequestView

__all__ = ["PolicyChain"]

T = TypeVar("T")


class PolicyChain:
    """Answers the questions of :class:`minivllm_plugin.engine.steering.Steering`.

    Args:
        calls: decision (``"order_waiting"``, …) -> the policies that implement it, first named first.
    """

    def __init__(self, calls: Mapping[str, Sequence[HookCall]]) -> None:
        self._calls = {decision: list(entries) for decision, entries in calls.items() if entries}
        self._answered_by = ""

    def answers(self, decision: str) -> bool:
        """Whether a policy for ``decision`` is left."""
        return decision in self._calls

    def name_of(self, decision: str) -> str:
        entries = self._calls.get(decision)
        return entries[0].plugin if entries else "none"

    def waiting_window(self) -> int:
        """The most that a plugin object which orders the queue asks for with ``minivllm_waiting_window``; 0 if none does."""
        wishes = [getattr(entry.owner, "minivllm_waiting_window", 0) for entry in self._calls.get("order_waiting", ())]
        return max((wish for wish in wishes if isinstance(wish, int)), default=0)

    def ask(self, decision: str, check: Callable[[Any], T], **arguments: Any) -> T | None:
        """The first answer that is not None, checked. One that raises, or answers nonsense, leaves this decision to the engine.

        Raises:
            PluginError: that happened, and errors are to be raised.
        """
        for entry in self._calls.get(decision, ()):
            try:
                checked: T | None = entry.call(arguments, check)
            except Exception as error:
                self._judge(decision, entry, error)
                return None
            self._judge(decision, entry, None)
            if checked is not None:
                self._answered_by = entry.plugin
                return checked
        return None

    def may_queue(self, request: RequestView, state: EngineState) -> None:
        """Ask ``admit``.

        Raises:
            RequestRejectedError: with the policy's reason.
        """
        verdict = self.ask("admit", _verdict, request=request, state=state) if self.answers("admit") else None
        if isinstance(verdict, Reject):
            raise RequestRejectedError(
                f"request {request.request_id!r} was refused by policy {self._answered_by!r}: {verdict.reason}",
                verdict.retry_after,
            )

    def salt(self, seq: EngineSequence, request: RequestView) -> str | None:
        """The request's own salt with all that policies add; a random one when a policy fails, so that nothing is shared.
        Ask only if :meth:`answers`."""
        parts: list[str] = []
        for entry in list(self._calls.get("cache_salt", ())):
            try:
                answer: str | None = entry.call({"request": request}, _salt)
            except Exception as error:
                entry.failed(error)  # counted, but never taken out: then requests would share what they must not
                return f"closed:{secrets.token_hex(16)}"
            if answer is not None:
                parts.append(f"plugin:{len(entry.plugin)}:{entry.plugin}:{len(answer)}:{answer}")
        # The caller's own part is marked as such even if it is the only one: it must not be able to spell another's.
        own = [] if seq.cache_salt is None else [f"own:{len(seq.cache_salt)}:{seq.cache_salt}"]
        return "".join(own + parts) or None

    def _judge(self, decision: str, entry: HookCall, error: Exception | None) -> None:
        if error is not None:
            entry.failed(error)
        elif entry.is_slow():
            entry.disable(f"too slow: {entry.slowness()}")
        if not entry.is_enabled:
            left = [other for other in self._calls[decision] if other is not entry]
            if left:
                self._calls[decision] = left
            else:
                del self._calls[decision]


def _verdict(answer: Any) -> Admit | Reject:
    if not isinstance(answer, Admit | Reject):
        raise TypeError(f"the answer must be Admit(), Reject(reason) or None, got {answer!r:.100}")
    if isinstance(answer, Reject):
        if not isinstance(answer.reason, str):
            raise TypeError(f"the reason of a Reject must be text, got {answer.reason!r:.100}")
        seconds = answer.retry_after
        if seconds is not None and (
            isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf
        ):
            raise TypeError(f"retry_after of a Reject must be seconds from 0 on, or None, got {seconds!r:.100}")
    return answer


def _salt(answer: Any) -> str:
    if not isinstance(answer, str):
        raise TypeError(f"the answer must be a string or None, got {answer!r:.100}")
    return str.__str__(answer)  # of a subclass, the text itself
