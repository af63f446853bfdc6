"""A limit on how long a model reasons: after so many tokens its reasoning is closed for it, and it goes on with the answer.

A logits processor like any other; engine thread. Its state follows from prompt and completion alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.extensions.logits import LogitsRow
from minivllm_plugin.extensions.requests import RequestStart
from minivllm_plugin.parsing.reasoning import ThinkParser
from minivllm_plugin.sampling_parameters import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["NAME", "ThinkingBudget", "ThinkingBudgetProcessor"]

OPEN, CLOSE = ThinkParser.OPEN, ThinkParser.CLOSE
TAIL_TOKENS = 8  # as many as a tag has at most, and some line breaks
TAIL_CHARACTERS = 64

NAME = "thinking_token_budget"
"""Under which it stands in ``SamplingParams.extra_args``; the value is a :class:`ThinkingBudget`."""


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """``num_tokens`` between ``<think>`` and ``</think>``.

    Attributes:
        closing: token ids of the closing tag.
        decode: token ids -> text, control tokens included. Tags are looked for in text: what a tag's tokens are depends on what
            stands before it.
    """

    num_tokens: int
    closing: tuple[int, ...]
    decode: Callable[[Sequence[int]], str]


@dataclass(slots=True)
class _State:
    is_thinking: bool
    num_thought: int = 0
    num_read: int = 0
    text: str = ""  # the last of what was read
    tail: tuple[int, ...] = ()  # the last tokens, as many as the closing tag has


class ThinkingBudgetProcessor:
    """Allows only the closing tag once a row's reasoning has its budget. Reasoning that ends by itself is left alone."""

    argmax_invariant = False
    repeatable = True

    def validate(self, value: object, params: SamplingParams) -> None:
        """Refuse what the engine did not make itself."""
        if not isinstance(value, ThinkingBudget):
            raise InvalidRequestError(
                f"{NAME} in extra_args is set by the engine; pass SamplingParams({NAME}=…) instead of {value!r:.100}"
            )

    def new_state(self, request: RequestStart) -> _State:
        budget: ThinkingBudget = request.value
        return _State(is_thinking=budget.decode(request.prompt_token_ids[-TAIL_TOKENS:]).rstrip().endswith(OPEN))

    def apply(self, logits: "Tensor", rows: Sequence[LogitsRow]) -> None:
        for index, row in enumerate(rows):
            budget: ThinkingBudget = row.value
            state: _State = row.state
            for token in row.output_token_ids[state.num_read :]:
                _read(state, token, budget)
            if state.is_thinking and state.num_thought >= budget.num_tokens:
                token = budget.closing[_begun(state.tail, budget.closing)]
                kept = logits[index, token].item()
                logits[index] = float("-inf")
                logits[index, token] = kept if kept > float("-inf") else 0.0


def _read(state: _State, token: int, budget: ThinkingBudget) -> None:
    state.num_read += 1
    state.tail = (*state.tail, token)[-len(budget.closing) :]
    state.text = (state.text + budget.decode((token,)))[-TAIL_CHARACTERS:]
    if state.is_thinking:
        state.num_thought += 1
        if CLOSE in state.text:
            state.is_thinking = False
    elif state.num_read <= TAIL_TOKENS and state.text.strip() == OPEN:
        state.is_thinking = True  # at the very beginning, perhaps after a line break; later it is text
        state.text = ""


def _begun(tail: tuple[int, ...], tag: tuple[int, ...]) -> int:
    """How many tokens of ``tag`` the text already ends with."""
    return next(size for size in range(min(len(tag) - 1, len(tail)), -1, -1) if tail[len(tail) - size :] == tag[:size])
