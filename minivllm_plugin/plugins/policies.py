"""Policies of one engine, in the order in which they were named: who is asked, and what happens when one fails.

The scheduler's side (records, checks) is :mod:`minivllm_plugin.engine.steering`. Engine thread.
"""

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

    def ask(self, decision: str, check: Callable[[Any], T], **arguments: Any) -> T | None:
        """The first answer that is not None, checked. One that raises, or answers nonsense, leaves this decision to the engine.

        Raises:
            PluginError: that happened, and errors are to be raised.
        """
        for entry in self._calls.get(decision, ()):
            try:
                answer = entry.call(arguments)
                checked = None if answer is None else check(answer)
            except Exception as error:
                self._judge(decision, entry, error)
                return None
            self._judge(decision, entry, None)
            if answer is not None:
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
        """The request's own salt with all that policies add; a random one when a policy fails, so that nothing is shared."""
        parts: list[str] = []
        for entry in list(self._calls.get("cache_salt", ())):
            try:
                answer = entry.call({"request": request})
                if answer is not None and not isinstance(answer, str):
                    raise TypeError(f"the answer must be a string or None, got {answer!r:.100}")
            except Exception as error:
                entry.failed(error)  # counted, but never taken out: then requests would share what they must not
                return f"closed:{secrets.token_hex(16)}"
            if answer is not None:
                parts.append(f"{entry.plugin}={len(answer)}:{answer}")
        if not parts:
            return seq.cache_salt
        own = "" if seq.cache_salt is None else f"own={len(seq.cache_salt)}:{seq.cache_salt}"
        return own + "".join(parts)

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
    return answer
