"""Conversations as they are sent to the model, kept on the server, one a browser tab. Event loop thread.

What the page shows is made from these and never read back: a page trims and re-indents text, and a history that differs by one
space is another prompt, which the prefix cache does not know.
"""

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minivllm_ui.answering import Answering, AnswerStats

__all__ = ["Conversation", "Conversations", "Message", "Turn"]

SESSIONS_KEPT = 500

Message = dict[str, str]


@dataclass(slots=True)
class Turn:
    """One question and what came of it.

    Attributes:
        answer: raw text of the model, thinking included.
        status: ``running``, ``done``, ``stopped`` or ``failed``; ``error`` says why.
        progress: what goes on while it runs, in words.
    """

    question: str
    answer: str = ""
    status: str = "running"
    error: str = ""
    progress: str = ""
    stats: "AnswerStats | None" = None


@dataclass(slots=True)
class Conversation:
    """One tab's conversation.

    Attributes:
        number: ``Chat 3`` on every page; its requests are ``chat-3-1``, ``chat-3-2``, …
        running: the answer that is being made.
    """

    number: int
    turns: list[Turn] = field(default_factory=list)
    running: "Answering | None" = None
    _requests: int = 0

    @property
    def name(self) -> str:
        return f"chat-{self.number}"

    def next_request_id(self) -> str:
        self._requests += 1
        return f"{self.name}-{self._requests}"

    def messages(self, system: str) -> list[Message]:
        """The prompt of the last turn: every question and answer before it, as they were."""
        messages = [{"role": "system", "content": system}] if system.strip() else []
        for turn in self.turns:
            messages.append({"role": "user", "content": turn.question})
            if turn is not self.turns[-1]:
                messages.append({"role": "assistant", "content": turn.answer})
        return messages

    def drop_from(self, index: int) -> Turn | None:
        """Forget turn ``index`` and what followed; returns it, or None if there is none."""
        if not 0 <= index < len(self.turns):
            return None
        turn = self.turns[index]
        del self.turns[index:]
        return turn


class Conversations:
    """The conversations by session; the ones used longest ago are forgotten first, none while it is being answered."""

    def __init__(self) -> None:
        self._by_session: OrderedDict[str, Conversation] = OrderedDict()
        self._numbers = itertools.count(1)

    def of(self, session: str) -> Conversation:
        conversation = self._by_session.get(session)
        if conversation is None:
            conversation = self._by_session[session] = Conversation(next(self._numbers))
            self._forget_old()
        self._by_session.move_to_end(session)
        return conversation

    def stop_all(self) -> None:
        """End every answer that is being made."""
        for conversation in self._by_session.values():
            if conversation.running is not None:
                conversation.running.stop()

    def _forget_old(self) -> None:
        for session in list(self._by_session)[: max(0, len(self._by_session) - SESSIONS_KEPT)]:
            if self._by_session[session].running is None:
                del self._by_session[session]
