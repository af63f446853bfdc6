"""What is taken from which rows of a batch: logits of the last row of each sequence computed to its end, logits of prompt rows
to be scored, hidden states of rows to be pooled."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.runner.logprobs import describe_rows

__all__ = ["LogitRows", "right_ones"]

POOLED = "pooled"
IGNORED = 0  # what a sequence gets that was not computed to its end; the scheduler does not look at it


@dataclass(slots=True)
class LogitRows:
    """Filled sequence by sequence while a batch is laid out.

    Attributes:
        sampled: indices into the batch of the sequences that get a next token; once for each row that one is chosen for, so one
            with drafts stands there several times in a row.
        rows: rows whose logits are needed: first one for each of ``sampled``, then those of prompts.
        pooled: rows whose hidden states are needed.
    """

    sampled: list[int] = field(default_factory=list)
    _last: list[int] = field(default_factory=list)
    _scored: list[int] = field(default_factory=list)
    _prompts: list[tuple[int, int, int]] = field(default_factory=list)  # index of the sequence, first position, how many
    pooled: list[int] = field(default_factory=list)
    _pools: list[tuple[int, int]] = field(default_factory=list)  # index of the sequence, how many rows

    @classmethod
    def of_rows(cls, rows: list[int]) -> "LogitRows":
        """Rows whose logits are needed, for somebody else to choose from."""
        return cls(_last=rows)

    @property
    def rows(self) -> list[int]:
        return self._last + self._scored

    def add(self, index: int, seq: Sequence, first_row: int) -> None:
        """Sequence ``index`` of the batch begins at ``first_row``."""
        start = seq.num_computed_tokens
        end = start + seq.num_scheduled_tokens
        if seq.pooling is not None:
            rows = range(first_row, first_row + seq.num_scheduled_tokens)
            if seq.pooling == "last":
                rows = rows[-1:] if end == seq.num_tokens else rows[:0]
            self.pooled += rows
            self._pools.append((index, len(rows)))
            return
        if seq.sampling_params.prompt_logprobs is not None:
            begin = max(start, len(seq.prompt_logprobs))  # computed again after a preemption, it is not scored again
            count = min(end, seq.num_prompt_tokens - 1) - begin
            if count > 0:
                self._prompts.append((index, begin, count))
                self._scored += range(first_row + begin - start, first_row + begin - start + count)
        num_rows = end - seq.length + 1  # one, and one for each draft
        if num_rows > 0:
            after = first_row + seq.num_scheduled_tokens
            self.sampled += [index] * num_rows
            self._last += range(after - num_rows, after)

    def answers(
        self,
        logits: Tensor | None,
        hidden: Tensor | None,
        seqs: SequenceABC[Sequence],
        choose: Callable[[Tensor, list[Sequence]], list[int]],
    ) -> list[int | list[int]]:
        """What a runner returns for the batch.

        Args:
            logits: float32 ``[len(rows), V]``; None when there are none.
            hidden: float ``[len(pooled), hidden_size]``, after the last norm; None when there are none.
            choose: one token for each row of logits, whose sequences it is told.
        """
        answers: list[int | list[int]] = [IGNORED] * len(seqs)
        if hidden is not None and self._pools:
            for index in self.take_embeddings(hidden, seqs):
                answers[index] = FAILED_TOKEN
        if logits is not None and self.rows:
            logits = self.take_prompt_logprobs(logits, seqs)
            chosen = choose(logits, [seqs[index] for index in self.sampled]) if self.sampled else []
            row = 0
            while row < len(chosen):
                index = self.sampled[row]
                drafts = seqs[index].draft_token_ids
                answers[index] = right_ones(drafts, chosen[row:]) if drafts else chosen[row]
                row += 1 + len(drafts)
        return answers

    def take_prompt_logprobs(self, logits: Tensor, seqs: SequenceABC[Sequence]) -> Tensor:
        """Score the prompt rows, append that to their sequences, and return the logits of ``sampled`` alone.

        Args:
            logits: float32 ``[len(rows), V]``.
        """
        offset = len(self._last)
        for index, begin, count in self._prompts:
            seq = seqs[index]
            tokens = seq.token_ids[begin + 1 : begin + 1 + count]
            seq.prompt_logprobs += describe_rows(
                logits[offset : offset + count], tokens, seq.sampling_params.prompt_logprobs or 0
            )
            offset += count
        return logits[: len(self._last)]

    def take_embeddings(self, hidden: Tensor, seqs: SequenceABC[Sequence]) -> list[int]:
        """Pool the hidden states of ``pooled`` into the embeddings of their sequences, each of length 1 (Euclid).

        A prompt that comes in pieces is summed along; computed anew after a preemption, it begins anew.

        Args:
            hidden: float ``[len(pooled), hidden_size]``, after the last norm.

        Returns:
            Indices of the sequences that have no finite embedding.
        """
        failed: list[int] = []
        offset = 0
        for index, count in self._pools:
            seq = seqs[index]
            total = hidden[offset : offset + count].float().sum(dim=0)
            offset += count
            if seq.num_computed_tokens and POOLED in seq.attachments:
                total = total + seq.attachments[POOLED]
            seq.attachments[POOLED] = total
            if seq.num_computed_tokens + seq.num_scheduled_tokens == seq.num_tokens:
                vector = torch.nn.functional.normalize(total, dim=0)  # of a mean and of its sum it is the same
                if bool(torch.isfinite(vector).all()):
                    seq.embedding = vector.tolist()
                else:
                    seq.failure = "its hidden states were not finite (NaN or infinite)"
                    failed.append(index)
        return failed


def right_ones(drafts: list[int], chosen: list[int]) -> list[int]:
    """``chosen``, a token a row, as far as it equals the drafts that the rows were computed from, and one more."""
    num_right = 0
    while num_right < len(drafts) and chosen[num_right] == drafts[num_right]:
        num_right += 1
    return chosen[: num_right + 1]
