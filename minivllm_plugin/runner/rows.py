"""Which rows of a batch need logits: the last one of each sequence computed to its end, and prompt rows to be scored."""

from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass, field

from torch import Tensor

from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.runner.logprobs import describe_rows

__all__ = ["LogitRows"]


@dataclass(slots=True)
class LogitRows:
    """Filled sequence by sequence while a batch is laid out.

    Attributes:
        sampled: indices into the batch of the sequences that get a next token.
        rows: rows whose logits are needed: first one for each of ``sampled``, then those of prompts.
    """

    sampled: list[int] = field(default_factory=list)
    _last: list[int] = field(default_factory=list)
    _scored: list[int] = field(default_factory=list)
    _prompts: list[tuple[int, int, int]] = field(default_factory=list)  # index of the sequence, first position, how many

    @property
    def rows(self) -> list[int]:
        return self._last + self._scored

    def add(self, index: int, seq: Sequence, first_row: int) -> None:
        """Sequence ``index`` of the batch begins at ``first_row``."""
        start = seq.num_computed_tokens
        end = start + seq.num_scheduled_tokens
        if seq.sampling_params.prompt_logprobs is not None:
            begin = max(start, len(seq.prompt_logprobs))  # computed again after a preemption, it is not scored again
            count = min(end, seq.num_prompt_tokens - 1) - begin
            if count > 0:
                self._prompts.append((index, begin, count))
                self._scored += range(first_row + begin - start, first_row + begin - start + count)
        if end == seq.num_tokens:
            self.sampled.append(index)
            self._last.append(first_row + seq.num_scheduled_tokens - 1)

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
