"""What becomes of a batch: its sequences move on when it is launched, and take in their tokens when these are known.

The two may lie apart, so that the next batch is launched while this one is computed; a step that waits does one after the other.
Called by the Scheduler, whose sequences and blocks these are, on the engine thread.
"""

from collections.abc import Sequence as SequenceABC
from typing import TYPE_CHECKING, NamedTuple

from minivllm_plugin.engine.endings import ask_stop_check, end_reason
from minivllm_plugin.engine.sequence import FAILED_TOKEN, MAX_TOKEN_ID, Sequence, SequenceStatus

if TYPE_CHECKING:
    from minivllm_plugin.engine.scheduler import Scheduler

__all__ = ["Launched", "advance", "awaited_drafts", "check_answers", "is_scheduled", "settle"]


class Launched(NamedTuple):
    """One sequence of a launched batch.

    Attributes:
        num_computed: its tokens whose K/V stand in the cache once the batch is done; guesses do not count.
        is_complete: whether a next token comes of it.
        drafts: the guesses that are verified beside it.
        num_preemptions: at the launch; one more since, and the result is nobody's.
    """

    seq: Sequence
    num_computed: int
    is_complete: bool
    drafts: tuple[int, ...]
    num_preemptions: int


def is_scheduled(seq: Sequence) -> bool:
    """Whether it still runs and has something to compute: it may have ended, or been put out, since its batch was chosen."""
    return seq.status is SequenceStatus.RUNNING and seq.num_scheduled_tokens > 0


def advance(seqs: SequenceABC[Sequence]) -> list[Launched | None]:
    """The batch is launched: count its tokens as computed, and a token to come for those that are complete.

    What reads the cache is launched later and so finds them written. None stands for one that was taken out meanwhile.
    """
    return [_advance(seq) for seq in seqs]


def _advance(seq: Sequence) -> Launched | None:
    if not is_scheduled(seq):
        return None
    drafts = tuple(seq.draft_token_ids)
    seq.num_computed_tokens += seq.num_scheduled_tokens - len(drafts)
    seq.num_scheduled_tokens = 0
    if drafts:
        seq.draft_token_ids = []
    is_complete = not seq.num_uncomputed_tokens
    if is_complete and seq.pooling is None:
        seq.num_pending_tokens += 1
    return Launched(seq, seq.num_computed_tokens, is_complete, drafts, seq.num_preemptions)


def awaited_drafts(seq: Sequence) -> tuple[int, ...] | None:
    """The guesses of a sequence whose batch is about to be launched; None for one that was taken out meanwhile."""
    return tuple(seq.draft_token_ids) if is_scheduled(seq) else None


def check_answers(drafts: SequenceABC[tuple[int, ...] | None], answers: SequenceABC[int | SequenceABC[int]]) -> None:
    """Raise ValueError unless there is one answer for each sequence, of token ids, and guesses among them are the right ones.

    Args:
        drafts: of each sequence; None for one whose answer nobody looks at.
    """
    if len(drafts) != len(answers):
        raise ValueError(f"{len(drafts)} sequences but {len(answers)} tokens")
    for guessed, answer in zip(drafts, answers, strict=True):
        tokens = (answer,) if isinstance(answer, int) else tuple(answer)
        if not tokens or (guessed is not None and tokens[:-1] != guessed[: len(tokens) - 1]):
            raise ValueError(f"the runner returned {tokens} for a sequence with drafts {guessed}")
        for token_id in tokens:
            if not FAILED_TOKEN <= token_id <= MAX_TOKEN_ID:
                raise ValueError(f"the runner returned {token_id}, which is neither a token id nor FAILED_TOKEN")


def settle(scheduler: "Scheduler", launched: SequenceABC[Launched | None], answers: SequenceABC[int | SequenceABC[int]]) -> None:
    """The tokens of a launched batch are known: append them, offer full blocks to others, end what has come to its end."""
    for entry, answer in zip(launched, answers, strict=True):
        if entry is None or entry.seq.is_finished or entry.num_preemptions != entry.seq.num_preemptions:
            continue
        if not entry.is_complete:
            scheduler.block_manager.commit(entry.seq, entry.num_computed)
        elif entry.seq.pooling is not None:  # its prompt was all there is to compute
            _settle_pooled(scheduler, entry, answer)
        else:
            _settle_tokens(scheduler, entry, (answer,) if isinstance(answer, int) else answer)


def _settle_pooled(scheduler: "Scheduler", entry: Launched, answer: int | SequenceABC[int]) -> None:
    if answer == FAILED_TOKEN:
        scheduler.block_manager.forget(entry.seq)
    else:
        scheduler.block_manager.commit(entry.seq, entry.num_computed)
    scheduler.finish(entry.seq, "error" if answer == FAILED_TOKEN else "stop")


def _settle_tokens(scheduler: "Scheduler", entry: Launched, tokens: SequenceABC[int]) -> None:
    seq = entry.seq
    seq.num_pending_tokens -= 1
    if entry.drafts and scheduler.speculation is not None:
        scheduler.speculation.note(seq, len(entry.drafts), len(tokens) - 1)
    for place, token_id in enumerate(tokens):
        if place:  # the one before it was a right guess, and so is computed
            seq.num_computed_tokens += 1
        if token_id == FAILED_TOKEN:
            scheduler.block_manager.forget(seq)  # or the next request with this prefix would fail on it, too
            scheduler.finish(seq, "error")
            return
        scheduler.block_manager.commit(seq, entry.num_computed + place)
        seq.append_token(token_id)
        reason = end_reason(seq, token_id, scheduler.end_token_ids, scheduler.num_slots)
        if reason is None and scheduler.stop_check is not None and seq.sampling_params.extra_args:
            reason = ask_stop_check(scheduler.stop_check, seq)
        if reason is not None:
            scheduler.finish(seq, reason)
            return
