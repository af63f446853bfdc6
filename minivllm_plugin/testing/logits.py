"""A runner that has logits and no model: for logits processors, under the real sampler, scheduler and cache bookkeeping."""

from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING, Any

import torch

from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.runner.rows import right_ones
from minivllm_plugin.runner.sampler import sample
from minivllm_plugin.testing.choosers import ChooseToken, HashedTokens
from minivllm_plugin.testing.ledger import LedgerRunner

if TYPE_CHECKING:
    from minivllm_plugin.extensions.logits_pipeline import LogitsPipeline

__all__ = ["HashedLogits", "LogitsRunner"]

LogitsOf = Callable[[Sequence], SequenceABC[float]]


class HashedLogits:
    """Logits of about unit variance that depend on all tokens so far: whoever changes one token changes everything after it.

    Args:
        vocab_size: how many logits.
        seed_of: what they depend on; :class:`~minivllm_plugin.testing.RepeatingTokens`, for one, on the last two tokens only.
    """

    def __init__(self, vocab_size: int, seed_of: ChooseToken | None = None) -> None:
        self.vocab_size = vocab_size
        self._seed_of: ChooseToken = seed_of if seed_of is not None else HashedTokens(2**31)

    def __call__(self, seq: Sequence) -> SequenceABC[float]:
        generator = torch.Generator().manual_seed(self._seed_of(seq))
        values: list[float] = torch.randn(self.vocab_size, generator=generator).tolist()
        return values


class LogitsRunner(LedgerRunner):
    """A :class:`LedgerRunner` whose tokens come out of the engine's own sampler.

    Args:
        num_blocks, block_size, options: as for :class:`LedgerRunner`.
        vocab_size: length of a row of logits.
        logits: of one sequence; :class:`HashedLogits` if it is left out.
        end_token_ids: what ``min_tokens`` holds back.

    Attributes:
        processors: the logits processors of plugins, set by the engine's extensions.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        logits: LogitsOf | None = None,
        end_token_ids: Collection[int] = (),
        **options: Any,
    ) -> None:
        super().__init__(num_blocks, block_size, vocab_size=vocab_size, **options)
        self.logits: LogitsOf = logits if logits is not None else HashedLogits(vocab_size)
        self.end_token_ids = tuple(end_token_ids)
        self.processors: LogitsPipeline | None = None

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int | list[int]]:
        """As :meth:`LedgerRunner.run`, with sampled tokens."""
        tokens = super().run(seqs, is_prefill)
        rows = [
            index
            for index, seq in enumerate(seqs)
            if not seq.is_finished and seq.num_computed_tokens + seq.num_scheduled_tokens >= seq.num_tokens
        ]
        sampled = [seqs[index] for index in rows for _ in (*seqs[index].draft_token_ids, None)]
        if sampled:
            logits = torch.tensor([row for index in rows for row in self._rows_of(seqs[index])], dtype=torch.float32)
            chosen = sample(logits, sampled, self.end_token_ids, self.processors)
            for index in rows:
                drafts = seqs[index].draft_token_ids
                tokens[index] = right_ones(drafts, chosen) if drafts else chosen[0]
                del chosen[: len(drafts) + 1]
        return tokens

    def _rows_of(self, seq: Sequence) -> Iterator[list[float]]:
        """Logits after its newest token, and after each of its drafts."""
        length = seq.num_tokens
        try:
            yield list(self.logits(seq))
            for draft in seq.draft_token_ids:
                seq.append_token(draft)
                yield list(self.logits(seq))
        finally:
            del seq.token_ids[length:]
