"""Speculative decoding by prompt lookup: what came after these tokens before is guessed to come again.

A sequence that repeats itself or quotes its prompt is given some guessed tokens to compute beside its newest one. The runner
says what it would have chosen after each, so wrong guesses cost time and change nothing. No second model (Saxena 2023,
"Prompt Lookup Decoding"; vLLM's ``ngram`` method). Called by the Scheduler, on the engine thread; knows nothing of torch or time.

Guessing pays while a step of a few rows costs about as much as one of a single row: on a CPU the weights that are read once
for all rows take most of its time. So guesses are made only while a step holds few rows, and a sequence whose guesses fail
makes fewer, then rests.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from minivllm_plugin.engine.sequence import Sequence

if TYPE_CHECKING:
    from minivllm_plugin.engine.scheduler import Scheduler

__all__ = ["KEY", "MOST_INDEXED", "MOST_ROWS", "PromptLookup", "SpeculationStatistics"]

MOST_ROWS = 8  # of a step with guesses: the tile of the CPU kernels; a step of 8 rows takes some 1.5 times that of one
MOST_INDEXED = 4096  # tokens of a step, for which it takes a few ms; so a long prompt delays no step
LENGTHS = (3, 1)  # of the runs of tokens that are looked up, longest first; a single token finds less likely guesses
FORGETTING = 0.9  # weight of the past in the share of guesses that came true
TOO_SELDOM = 0.12  # below this share a guess costs more than it brings
REST = 32  # tokens without a guess after that; twice as many after every rest that no right guess has followed
LONGEST_REST = 512  # what is guessed between such rests is then some 1 % of all rows
KEY = "prompt_lookup"


@dataclass(slots=True)
class SpeculationStatistics:
    """Totals since start: guessed tokens, and those of them that came true."""

    drafted_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class _History:
    """Where each run of tokens of one sequence was last followed by something, and how its guesses fared."""

    places: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0
    most: int = 0
    share_true: float = 0.5
    resting: int = 0
    next_rest: int = REST

    def index(self, tokens: list[int], most: int) -> int:
        """Note where runs of ``tokens`` stand, for at most so many tokens more than before; how many it were."""
        begin, self.num_indexed = self.num_indexed, min(len(tokens), self.num_indexed + most)
        for end in range(max(1, begin), self.num_indexed):  # the run before the newest token is not followed yet
            for length in LENGTHS:
                if end >= length:
                    self.places[tuple(tokens[end - length : end])] = end
        return self.num_indexed - begin


class PromptLookup:
    """Makes the guesses of one engine.

    Args:
        num_speculative_tokens: most guessed tokens of a sequence in one step.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens
        self.statistics = SpeculationStatistics()
        self._indexed = 0  # tokens, in this step

    def draft(self, scheduler: "Scheduler", batch: list[Sequence]) -> None:
        """Give sequences of a decode batch some guessed tokens, written to ``draft_token_ids`` and ``num_scheduled_tokens``.

        None while somebody waits or computes a prompt: there is better use for a step then.
        """
        if scheduler.waiting or not batch or any(seq.num_uncomputed_tokens != 1 for seq in batch):
            return
        share = min(MOST_ROWS, scheduler.step_budget) // len(batch) - 1
        if share < 1:
            return
        self._indexed = 0
        for seq in batch:
            most = min(share, self.num_speculative_tokens, _tokens_left(seq) - 1)
            drafts = self._propose(seq, most) if most > 0 and _may_guess(seq) else []
            # A block is taken for guesses only where everybody else would still find one.
            seq.draft_token_ids = drafts[: scheduler.block_manager.extend(seq, len(drafts), keep_free=len(scheduler.running))]
            seq.num_scheduled_tokens += len(seq.draft_token_ids)

    def note(self, seq: Sequence, num_drafted: int, num_accepted: int) -> None:
        """So many of the guesses of ``seq`` came true."""
        self.statistics.drafted_tokens += num_drafted
        self.statistics.accepted_tokens += num_accepted
        history: _History = seq.attachments[KEY]
        if num_accepted == num_drafted:
            history.most = min(self.num_speculative_tokens, 2 * history.most)
        else:
            history.most = max(1, num_accepted + 1 if num_accepted else history.most // 2)
        history.share_true = FORGETTING * history.share_true + (1 - FORGETTING) * (num_accepted > 0)
        if num_accepted:
            history.next_rest = REST
        if history.share_true < TOO_SELDOM:
            history.share_true, history.resting = 2 * TOO_SELDOM, history.next_rest
            history.next_rest = min(2 * history.next_rest, LONGEST_REST)

    def _propose(self, seq: Sequence, most: int) -> list[int]:
        history = seq.attachments.get(KEY)
        if history is None:
            history = seq.attachments[KEY] = _History(most=self.num_speculative_tokens)
        tokens = seq.token_ids
        if history.resting:
            history.resting -= 1
            return []
        self._indexed += history.index(tokens, MOST_INDEXED - self._indexed)
        if history.num_indexed < len(tokens):
            return []
        for length in LENGTHS:
            place = history.places.get(tuple(tokens[-length:]))
            if place is not None:
                break
        else:
            return []
        drafts: list[int] = []
        for position in range(place, place + min(most, history.most)):  # beyond the end the guess goes on with itself
            drafts.append(tokens[position] if position < len(tokens) else drafts[position - len(tokens)])
        return drafts


def _may_guess(seq: Sequence) -> bool:
    """Whether what the runner chooses for a row depends on the row's logits and place alone, not on what was chosen before."""
    params = seq.sampling_params
    if seq.pooling is not None or params.adjusts_logits or params.extra_args or params.structured_outputs is not None:
        return False
    return params.logprobs is None and params.prompt_logprobs is None and params.thinking_token_budget is None


def _tokens_left(seq: Sequence) -> int:
    """Tokens that ``seq`` may still get, at least 1; its last one needs no slot."""
    limits = [2**31]
    if seq.max_tokens is not None:
        limits.append(seq.max_tokens - seq.num_completion_tokens)
    if seq.max_model_length is not None:
        limits.append(seq.max_model_length - seq.num_tokens)
    return max(1, min(limits))
