"""The engine's only view of a model: protocols of what computes batches. No torch here."""

from collections.abc import Sequence as SequenceABC
from typing import Protocol

from minivllm_plugin.engine.sequence import Sequence

__all__ = ["AsyncRunner", "PendingAnswers", "Runner", "RunnerAnswers"]

RunnerAnswers = SequenceABC[int | SequenceABC[int]]
"""One token a sequence, or, for one with drafts, several."""


class Runner(Protocol):
    """Computes one batch. The engine's only view of a model.

    One that also pools hidden states, for sequences with ``pooling``, says so by an attribute ``can_pool = True``; one that
    verifies guessed tokens, of sequences with ``draft_token_ids``, by ``can_speculate = True``.
    """

    def run(self, seqs: list[Sequence], is_prefill: bool) -> RunnerAnswers:
        """One next token per sequence, or ``FAILED_TOKEN``. For each, tokens ``num_computed_tokens`` and the following
        ``num_scheduled_tokens`` are computed, the last of these being its ``draft_token_ids``; the result of one that is not
        computed to its end is ignored. For one with drafts, a list: those of them, from the first on, that it would have
        chosen itself, and the token that it chooses after them."""
        ...


class PendingAnswers(Protocol):
    """The answers of a launched batch, on their way from a device."""

    def wait(self) -> RunnerAnswers:
        """As :meth:`Runner.run` returns them."""
        ...


class AsyncRunner(Runner, Protocol):
    """One that can begin a batch before the tokens of the one before it are known."""

    def can_launch(self, seqs: list[Sequence]) -> bool:
        """Whether the choice of all their next tokens can do without the host's knowing their latest ones."""
        ...

    def launch(self, seqs: list[Sequence], is_prefill: bool) -> PendingAnswers:
        """Begin to compute a batch. A sequence with ``num_pending_tokens`` goes on with the token that the launch before this one
        chose for it. The engine waits for one launch before it begins the next but one."""
        ...
