"""A runner without a model that proves where every sequence writes and reads.

A real cache slot holds a vector that depends on a token, its position and everything before it. A ledger slot holds just
those: token, position and a digest of the history, salt included. Whoever reads a slot knows what must stand there.
"""

import threading
from collections import deque
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from typing import Any, NamedTuple

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import MAX_TOKEN_ID, Sequence, SequenceStatus, computes_prompt
from minivllm_plugin.testing.choosers import ChooseToken, HashedTokens
from minivllm_plugin.testing.invariants import InvariantError

__all__ = ["BatchRecord", "LedgerRunner", "RowRecord"]

GATE_SECONDS = 30.0
# Returned for rows that are not computed to their end. Nobody may look at it; whoever does gets a token that stands out.
UNUSED_TOKEN = MAX_TOKEN_ID


@dataclass(frozen=True, slots=True)
class RowRecord:
    """What one sequence was given in one batch: tokens ``num_computed .. num_computed + num_scheduled - 1``."""

    request_id: str
    num_computed: int
    num_scheduled: int


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch as the runner saw it."""

    is_prefill: bool
    rows: tuple[RowRecord, ...]

    @classmethod
    def of(cls, seqs: SequenceABC[Sequence], is_prefill: bool) -> "BatchRecord":
        rows = (RowRecord(seq.request_id or "", seq.num_computed_tokens, seq.num_scheduled_tokens) for seq in seqs)
        return cls(is_prefill, tuple(rows))

    @property
    def num_tokens(self) -> int:
        return sum(row.num_scheduled for row in self.rows)

    @property
    def request_ids(self) -> tuple[str, ...]:
        return tuple(row.request_id for row in self.rows)


class _Slot(NamedTuple):
    token: int
    position: int
    history: int


class LedgerRunner:
    """A :class:`~minivllm_plugin.engine.llm_engine.Runner` that checks every read and write of the KV pool.

    For each scheduled token it writes into the slot that the block table names. Then it reads positions ``0 .. n-1`` of each
    sequence back and wants to see that sequence's own tokens, each after its own history. A slot that nobody wrote, that
    holds somebody else's token or the same token after another history raises :class:`InvariantError`.

    Sequences that ended after they were scheduled (aborted) are skipped.

    Args:
        num_blocks, block_size: geometry of the pool; block ids beyond it are an error.
        vocab_size: of the default chooser.
        choose: next token of a sequence; default :class:`~minivllm_plugin.testing.HashedTokens`.
        max_num_batched_tokens: more tokens in one batch are an error; None does not look.
        fail_on_call: the call, counted from 1, that raises RuntimeError instead of answering.
        gate: if given, every call waits until this event is set.
        can_speculate: verify drafts; without it there must be none.

    Attributes:
        num_calls: calls so far.
        batches: the latest batches, oldest first (at most 10,000).
        entered: set as soon as a call begins; clear it to wait for the next one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        vocab_size: int = 1000,
        choose: ChooseToken | None = None,
        max_num_batched_tokens: int | None = None,
        fail_on_call: int | None = None,
        gate: threading.Event | None = None,
        can_speculate: bool = False,
    ) -> None:
        self.block_size = block_size
        self.choose: ChooseToken = choose if choose is not None else HashedTokens(vocab_size)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.fail_on_call = fail_on_call
        self.gate = gate
        self.can_speculate = can_speculate
        self.entered = threading.Event()
        self.num_calls = 0
        self.batches: deque[BatchRecord] = deque(maxlen=10_000)
        self._blocks: list[list[_Slot | None]] = [[None] * block_size for _ in range(num_blocks)]
        self._expected: dict[str, tuple[Sequence, list[_Slot]]] = {}

    @classmethod
    def for_scheduler(cls, scheduler: Scheduler, **options: Any) -> "LedgerRunner":
        """A runner with the geometry and the token budget of ``scheduler``; ``options`` as for the constructor."""
        options.setdefault("max_num_batched_tokens", scheduler.max_num_batched_tokens)
        return cls(scheduler.block_manager.num_blocks, scheduler.block_size, **options)

    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int | list[int]]:
        """One token per sequence; see :class:`minivllm_plugin.engine.llm_engine.Runner`.

        Raises:
            InvariantError: the batch is malformed, or a sequence would not read exactly its own tokens.
            RuntimeError: this is call number ``fail_on_call``.
        """
        self.num_calls += 1
        self.entered.set()
        if self.gate is not None and not self.gate.wait(GATE_SECONDS):
            raise InvariantError(f"the gate was not opened within {GATE_SECONDS:g} s")
        if self.num_calls == self.fail_on_call:
            raise RuntimeError(f"call {self.num_calls} fails on purpose")
        batch = [seq for seq in seqs if not seq.is_finished]
        self._check_batch(seqs, batch, is_prefill)
        self.batches.append(BatchRecord.of(batch, is_prefill))
        written: set[tuple[int, int]] = set()
        for seq in batch:
            self._write(seq, written)
        for seq in batch:
            self._read_back(seq)
        self._expected = {key: value for key, value in self._expected.items() if not value[0].is_finished}
        return [self._answer(seq) for seq in seqs]

    def poison(self, block_id: int) -> None:
        """Forget what stands in a block, so that reading it before it is written again is an error."""
        self._blocks[block_id] = [None] * self.block_size

    def _check_batch(self, seqs: list[Sequence], batch: list[Sequence], is_prefill: bool) -> None:
        if not seqs:
            raise InvariantError("an empty batch reached the runner")
        if len({id(seq) for seq in seqs}) != len(seqs):
            raise InvariantError(f"a sequence stands twice in one batch: {seqs}")
        for seq in batch:
            fault = self._fault_of(seq, is_prefill)
            if fault is not None:
                raise InvariantError(f"{seq!r} {fault}")
        total = sum(seq.num_scheduled_tokens for seq in batch)
        if self.max_num_batched_tokens is not None and total > self.max_num_batched_tokens:
            raise InvariantError(f"{total} tokens in one batch, the budget is {self.max_num_batched_tokens}")

    def _fault_of(self, seq: Sequence, is_prefill: bool) -> str | None:
        end = seq.num_computed_tokens + seq.num_scheduled_tokens
        if seq.status is not SequenceStatus.RUNNING:
            return "is in a batch but not running"
        if seq.num_scheduled_tokens < 1:
            return "is in a batch with nothing to compute"
        if seq.draft_token_ids and not (self.can_speculate and end == seq.num_tokens + len(seq.draft_token_ids)):
            return f"has {len(seq.draft_token_ids)} drafts that are not to be computed"
        if end > seq.num_tokens + len(seq.draft_token_ids):
            return f"is given {seq.num_scheduled_tokens} tokens, more than it has left"
        if len(seq.block_table) * self.block_size < end:
            return f"has too few blocks for {end} tokens"
        if min(seq.block_table) < 0 or max(seq.block_table) >= len(self._blocks):
            return f"names a block outside the pool of {len(self._blocks)}"
        if not is_prefill and computes_prompt(seq):
            return "computes prompt tokens in a batch that is called a decode batch"
        return None

    def _write(self, seq: Sequence, written: set[tuple[int, int]]) -> None:
        slots = self._slots_of(seq)
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + seq.num_scheduled_tokens):
            place = seq.block_table[position // self.block_size], position % self.block_size
            if place in written:
                raise InvariantError(f"{seq!r} writes slot {place[1]} of block {place[0]}, and so does another row")
            written.add(place)
            self._blocks[place[0]][place[1]] = slots[position]

    def _read_back(self, seq: Sequence) -> None:
        end = seq.num_computed_tokens + seq.num_scheduled_tokens
        slots = self._slots_of(seq)
        for start in range(0, end, self.block_size):
            block_id = seq.block_table[start // self.block_size]
            stop = min(start + self.block_size, end)
            found = self._blocks[block_id][: stop - start]
            if found == slots[start:stop]:
                continue
            for position, slot in enumerate(found, start):
                if slot != slots[position]:
                    raise InvariantError(
                        f"{seq!r} reads token {slots[position].token} at position {position} from block {block_id}, "
                        + _describe(slot, slots[position])
                    )

    def _slots_of(self, seq: Sequence) -> list[_Slot]:
        """What the slots of all tokens of ``seq`` must hold."""
        request_id = seq.request_id or ""
        owner, slots = self._expected.get(request_id, (None, []))
        if owner is not seq:
            slots = []
            self._expected[request_id] = (seq, slots)
        _append_slots(slots, seq.token_ids[len(slots) :], seq.cache_salt)
        if not seq.draft_token_ids:
            return slots
        guessed = list(slots)  # what stands there until a draft that was wrong is written over
        _append_slots(guessed, seq.draft_token_ids, seq.cache_salt)
        return guessed

    def _answer(self, seq: Sequence) -> int | list[int]:
        complete = seq.num_computed_tokens + seq.num_scheduled_tokens >= seq.num_tokens
        if not complete or seq.is_finished:
            return UNUSED_TOKEN
        return self._verified(seq) if seq.draft_token_ids else self.choose(seq)

    def _verified(self, seq: Sequence) -> list[int]:
        """The right ones among the drafts and the token after them, each chosen as if those before it had been there."""
        length = seq.num_tokens
        answer: list[int] = []
        try:
            for draft in (*seq.draft_token_ids, None):
                answer.append(self.choose(seq))
                if answer[-1] != draft:
                    break
                seq.append_token(answer[-1])
        finally:
            del seq.token_ids[length:]
        return answer


def _append_slots(slots: list[_Slot], token_ids: SequenceABC[int], salt: str | None) -> None:
    """Go on with ``slots``, which begin at position 0, for these tokens."""
    history = slots[-1].history if slots else hash(salt)
    for token_id in token_ids:
        history = hash((history, token_id))
        slots.append(_Slot(token_id, len(slots), history))


def _describe(found: _Slot | None, wanted: _Slot) -> str:
    if found is None:
        return "which nobody wrote"
    if found[:2] == wanted[:2]:
        return "which holds that token after another history"
    return f"which holds token {found.token} at position {found.position}"
