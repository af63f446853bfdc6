"""Which sequences run in the next step, with how many tokens each, and what becomes of them afterwards.

Owns the order of ``waiting`` and ``running``; alone writes to sequences and calls the BlockManager. Single-threaded: the
engine thread calls it. Knows nothing of torch, text or time.

Two modes. Built with the five classic arguments it alternates: a prefill batch while anybody can be admitted, else a decode
batch. With ``enable_chunked_prefill`` every step is a mixed batch under one token budget: first one token for each decoding
sequence, then the rest of the budget for prompts, cut where it ends. In both, preemption is by recompute, and a sequence
is never dropped: it sits in exactly one of the two queues until it is finished.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator
from collections.abc import Sequence as SequenceABC

from minivllm_plugin.config import SchedulingPolicy, check_integer
from minivllm_plugin.engine.admission import check_prompt_fits
from minivllm_plugin.engine.block_manager import BlockManager
from minivllm_plugin.engine.endings import is_full, may_outgrow
from minivllm_plugin.engine.intake import Launched, advance, awaited_drafts, check_answers, settle
from minivllm_plugin.engine.integrity import check_queues
from minivllm_plugin.engine.order import Order
from minivllm_plugin.engine.prompt_lookup import PromptLookup
from minivllm_plugin.engine.sequence import FinishReason, Sequence, SequenceStatus, computes_prompt
from minivllm_plugin.engine.steering import Steering, StepLimits
from minivllm_plugin.errors import ConfigError, InvalidRequestError

__all__ = ["Scheduler"]


class Scheduler:
    """Token-level batch scheduler over a paged KV pool.

    Args:
        max_num_sequences: most sequences that run at once.
        max_num_batched_tokens: most tokens computed in one step. Cached tokens do not count, except in a classic prefill
            batch, where each prompt counts in full.
        max_cached_blocks: blocks in the KV pool.
        block_size: tokens per block.
        eos: token id that ends a sequence unless it ignores EOS; -1 for a model that has none.
        end_token_ids: further ids that end it in the same way (a chat model may have several).
        enable_chunked_prefill: mixed batches, prompts computed in pieces.
        enable_prefix_caching: reuse blocks whose tokens and history are equal.
        policy: ``fcfs``, or ``priority`` (smaller ``Sequence.priority`` first, then arrival; the victim is the opposite end).

    Attributes:
        stop_check: asked after every token of a sequence whose ``extra_args`` are set; a text ends it with reason ``stop``, a
            RequestFailedError with reason ``error``.
        speculation: guesses tokens for sequences that decode; only for a runner that verifies them (``can_speculate``).

    Raises:
        ConfigError: naming the argument, its value and the limit.
    """

    def __init__(
        self,
        max_num_sequences: int,
        max_num_batched_tokens: int,
        max_cached_blocks: int,
        block_size: int,
        eos: int,
        *,
        end_token_ids: Collection[int] = (),
        enable_chunked_prefill: bool = False,
        enable_prefix_caching: bool = True,
        policy: SchedulingPolicy = "fcfs",
    ) -> None:
        check_integer("max_num_sequences", max_num_sequences, at_least=1)
        check_integer("max_num_batched_tokens", max_num_batched_tokens, at_least=1)
        check_integer("max_cached_blocks", max_cached_blocks, at_least=1)
        check_integer("eos", eos, at_least=-1)
        if policy not in ("fcfs", "priority"):
            raise ConfigError(f"policy must be 'fcfs' or 'priority', got {policy!r}")
        self.max_num_sequences = max_num_sequences
        self.max_num_batched_tokens = max_num_batched_tokens
        self.eos = eos
        self.end_token_ids = frozenset({eos, *end_token_ids})
        self.enable_chunked_prefill = enable_chunked_prefill
        self.policy = policy
        self.stop_check: Callable[[Sequence], str | None] | None = None
        self.speculation: PromptLookup | None = None
        self.block_manager = BlockManager(max_cached_blocks, block_size, enable_prefix_caching=enable_prefix_caching)
        self.waiting: deque[Sequence] = deque()
        self.running: deque[Sequence] = deque()
        self.num_steps = 0
        self.num_preemptions = 0
        self.admitted: list[Sequence] = []
        """Who left ``waiting`` in the latest step."""
        self.preempted: list[Sequence] = []
        """Who was put back into it since the latest step began."""
        self._order = Order(policy)
        self._steering: Steering | None = None
        self._limits = self._own_limits()
        self._live: dict[str, Sequence] = {}
        self._num_arrivals = 0
        self._num_turns = 0

    @property
    def block_size(self) -> int:
        return self.block_manager.block_size

    @property
    def num_live_sequences(self) -> int:
        """Sequences in either queue."""
        return len(self._live)

    @property
    def num_slots(self) -> int:
        """Tokens that the whole pool holds."""
        return self.block_manager.num_blocks * self.block_size

    @property
    def step_budget(self) -> int:
        """Most tokens that the latest step could compute."""
        return self._limits.num_tokens

    def steer(self, steering: Steering | None) -> None:
        """Have policies answer what they have an answer to; None takes them away again."""
        self._steering = steering
        self.block_manager.prepare_taking = None if steering is None else steering.evictor(self)

    def restore_order(self) -> None:
        """Put ``waiting`` back into our own order, after a policy had it in another."""
        self._order.restore(self.waiting)

    # --- in and out --------------------------------------------------------------------------------------------

    def add_sequence(self, sequence: Sequence) -> None:
        """Append ``sequence`` to ``waiting``.

        Raises:
            InvalidRequestError: its id is live, it was run before, or its block size is another than the pool's.
            ContextWindowExceededError: its prompt can never be computed: more blocks than the pool has, or, without
                chunked prefill, more tokens than one step may compute.
        """
        if sequence.status is not SequenceStatus.WAITING or sequence.block_table or sequence.request_id in self._live:
            raise InvalidRequestError(
                f"request {sequence.request_id!r} is already in the engine, or was; use a new id and a new Sequence"
            )
        if sequence.block_size not in (None, self.block_size):
            raise InvalidRequestError(
                f"block_size={sequence.block_size} of the sequence differs from the scheduler's {self.block_size}; leave it out"
            )
        check_prompt_fits(
            sequence.num_tokens,
            num_blocks=self.block_manager.num_blocks,
            block_size=self.block_size,
            max_num_batched_tokens=None if self.enable_chunked_prefill else self.max_num_batched_tokens,
        )
        if sequence.request_id is None:
            sequence.request_id = self._unused_id()
        sequence.block_size = self.block_size
        self._live[sequence.request_id] = sequence
        sequence.arrival = self._num_arrivals
        self._num_arrivals += 1
        self._order.enqueue(self.waiting, sequence)

    def abort(self, request_id: str) -> Sequence | None:
        """End a live sequence in whatever state it is and free its blocks. Unknown ids are ignored."""
        sequence = self._live.get(request_id)
        if sequence is not None:
            self.finish(sequence, "abort")
        return sequence

    def is_finished(self) -> bool:
        """True when both queues are empty."""
        return not self.waiting and not self.running

    def get(self, request_id: str) -> Sequence | None:
        """The live sequence with this id."""
        return self._live.get(request_id)

    # --- one step ----------------------------------------------------------------------------------------------

    def schedule(self) -> tuple[list[Sequence], bool]:
        """Choose the next batch.

        Returns:
            The sequences, each with ``num_scheduled_tokens`` >= 1, and whether any prompt token is computed (or computed
            again after a preemption; in the classic mode: whether anybody was admitted). Empty only when both queues are
            empty.
        """
        self.num_steps += 1
        self.admitted = []
        self.preempted = []
        self._limits = self._own_limits()
        if self._steering is not None:
            limits = self._steering.limits(self, self._limits)
            # A classic prefill batch takes whole prompts, so a smaller budget could strand one.
            self._limits = limits if self.enable_chunked_prefill else self._limits._replace(num_sequences=limits.num_sequences)
        for sequence in self.running:
            sequence.num_scheduled_tokens = 0
            if sequence.draft_token_ids:  # of a batch that was never computed
                sequence.draft_token_ids = []
        if self.enable_chunked_prefill:
            batch, is_prefill = self._schedule_mixed(), False
        else:
            batch = self._schedule_prefill()
            is_prefill = bool(batch)
            batch = batch or self._schedule_decode()
        is_prefill = is_prefill or any(computes_prompt(sequence) for sequence in batch)
        if self.speculation is not None:
            self.speculation.draft(self, batch)
        return batch, is_prefill

    def postprocess(self, seqs: SequenceABC[Sequence], token_ids: SequenceABC[int | SequenceABC[int]]) -> None:
        """Take in what the runner computed: one sampled token per sequence of the preceding :meth:`schedule`.

        The token of a sequence that is only partly prefilled, or that was aborted meanwhile, is ignored. One with drafts has a
        list: as many of these as are right, and the token that follows them.
        ``FAILED_TOKEN`` ends its sequence with reason ``error``, and what it computed is not offered to others.

        Raises:
            ValueError: another number of tokens than of sequences, or something that is no token id; nothing was changed.
        """
        check_answers([awaited_drafts(seq) for seq in seqs], token_ids)
        settle(self, self.advance(seqs), token_ids)

    def advance(self, seqs: SequenceABC[Sequence]) -> list[Launched | None]:
        """The batch of the preceding :meth:`schedule` is launched; the next may be scheduled before its tokens are known."""
        return advance(seqs)

    def settle(self, launched: SequenceABC[Launched | None], token_ids: SequenceABC[int | SequenceABC[int]]) -> None:
        """As :meth:`postprocess`, of a batch that went through :meth:`advance` when it was launched.

        Raises:
            ValueError: as there; no token was taken in.
        """
        check_answers([None if entry is None else entry.drafts for entry in launched], token_ids)
        settle(self, launched, token_ids)

    def preempt(self, seq: Sequence) -> None:
        """Move a running sequence to the front of ``waiting`` and free its blocks; it is computed again when it returns.

        Its full blocks stay in the prefix index, so what nobody takes meanwhile is not computed twice. Under the
        ``priority`` policy it returns to its place in that order.

        Raises:
            InvalidRequestError: it is not running here.
        """
        if seq.status is not SequenceStatus.RUNNING or self._live.get(seq.request_id or "") is not seq:
            raise InvalidRequestError(f"request {seq.request_id!r} is not running; only a running sequence can be preempted")
        self.running.remove(seq)
        self.block_manager.deallocate(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_scheduled_tokens = 0
        seq.draft_token_ids = []
        seq.num_pending_tokens = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(seq)
        self._order.requeue(self.waiting, seq)

    def check_integrity(self) -> None:
        """Raise AssertionError unless queues, live ids and blocks agree. For tests and debugging: O(pool)."""
        check_queues(self)
        self.block_manager.check_integrity(self.running)

    def _own_limits(self) -> StepLimits:
        return StepLimits(self.max_num_batched_tokens, self.max_num_batched_tokens, self.max_num_sequences)

    # --- phases ------------------------------------------------------------------------------------------------

    def _schedule_mixed(self) -> list[Sequence]:
        batch: list[Sequence] = []
        budget, prefill_budget, _ = self._limits
        order = self._turns()
        decodes_left = sum(1 for seq in order if seq.num_uncomputed_tokens == 1)
        for seq in order:
            if not budget:
                break
            if seq.status is not SequenceStatus.RUNNING:  # preempted for one that came before it in this very step
                continue
            if seq.num_uncomputed_tokens == 1:
                decodes_left -= 1
                tokens = 1 if self._make_room(seq) else 0
            else:
                tokens = min(seq.num_uncomputed_tokens, max(1, budget - decodes_left), prefill_budget)
                prefill_budget -= tokens
            if tokens:
                self._grant(seq, tokens, batch)
                budget -= tokens
        if not self.preempted:  # whoever was just put out would only come straight back
            self._admit(batch, min(budget, prefill_budget), chunk=True)
        return batch

    def _schedule_prefill(self) -> list[Sequence]:
        batch: list[Sequence] = []
        budget = self.max_num_batched_tokens
        for seq in self.running:  # only a recompute longer than the budget is ever left half done in this mode
            if seq.num_uncomputed_tokens > 1 and budget:
                tokens = min(seq.num_uncomputed_tokens, budget)
                self._grant(seq, tokens, batch)
                budget -= tokens
        self._admit(batch, budget, chunk=False)
        return batch

    def _schedule_decode(self) -> list[Sequence]:
        batch: list[Sequence] = []
        for seq in self._turns():
            if len(batch) == self.max_num_batched_tokens:
                break
            if seq.status is SequenceStatus.RUNNING and self._make_room(seq):
                self._grant(seq, 1, batch)
        return batch

    def _turns(self) -> list[Sequence]:
        """Who runs, first to come first, without those that end with the token that is still to come."""
        order = self._order.turns(self.running)
        if not any(seq.num_pending_tokens for seq in order):
            return order
        return [seq for seq in order if not is_full(seq, self.num_slots, seq.num_pending_tokens)]

    def _admit(self, batch: list[Sequence], budget: int, *, chunk: bool) -> None:
        """Promote from the head of ``waiting``; stop at the first that does not fit, so that nobody overtakes it.

        In mixed batches a block is left for each of those who run and may want one more, or the newcomer would soon be put
        out again.
        """
        most = self._limits.num_sequences
        if self._steering is not None and self.waiting and budget > 0 and len(self.running) < most:
            self._steering.order_waiting(self)
        keep_free = None if chunk else 0
        while self.waiting and budget > 0 and len(self.running) < most:
            if keep_free is None:
                keep_free = sum(1 for seq in self.running if may_outgrow(seq, len(seq.block_table) * self.block_size))
            seq = self.waiting[0]
            prefix = self.block_manager.find_prefix(seq)
            if not self.block_manager.can_allocate(seq, prefix, reserve=keep_free):
                break
            tokens = seq.num_tokens - len(prefix) * self.block_size
            cost = tokens if chunk else seq.num_tokens
            # A resumed sequence may have outgrown the whole budget; refusing to cut it would strand it.
            if not chunk and cost > budget and (batch or cost <= self.max_num_batched_tokens):
                break
            tokens = min(tokens, budget)
            self.waiting.popleft()
            self.block_manager.allocate(seq, prefix)
            if seq.prompt_cached_tokens is None:
                seq.prompt_cached_tokens = seq.num_cached_tokens
            seq.status = SequenceStatus.RUNNING
            self.running.append(seq)
            self.admitted.append(seq)
            self._grant(seq, tokens, batch)
            budget -= cost
        if self._steering is not None:
            self._steering.note_admitted(self.admitted)

    def _make_room(self, seq: Sequence) -> bool:
        """Give ``seq`` a slot for its newest token, preempting others; False if ``seq`` itself had to go."""
        victims: Iterator[Sequence] | None = None
        while not self.block_manager.can_append(seq):
            victims = self._victims(seq) if victims is None else victims
            victim = next(victims)
            self.preempt(victim)
            if victim is seq:
                return False
        self.block_manager.append(seq)
        return True

    def _victims(self, needy: Sequence) -> Iterator[Sequence]:
        """Those not yet in this batch, first to go first: a policy's choice, then ours; when nobody is left, the needy one."""
        candidates = [seq for seq in self.running if seq is not needy and not seq.num_scheduled_tokens]
        if self._steering is not None:
            missing = self.block_manager.blocks_needed(needy.length) - len(needy.block_table)
            for victim in self._steering.victims(self, candidates, needy, missing):
                yield victim
                candidates = [seq for seq in candidates if seq is not victim]
        while candidates:
            victim = self._order.victim(candidates)
            yield victim
            candidates.remove(victim)
        yield needy

    def _grant(self, seq: Sequence, tokens: int, batch: list[Sequence]) -> None:
        seq.num_scheduled_tokens = tokens
        seq.last_scheduled_step = self.num_steps
        seq.last_turn = self._num_turns
        self._num_turns += 1
        if seq.first_scheduled_step is None:
            seq.first_scheduled_step = self.num_steps
        batch.append(seq)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a live sequence, for this reason, and free its blocks."""
        queue = self.running if seq.status is SequenceStatus.RUNNING else self.waiting
        queue.remove(seq)
        self.block_manager.deallocate(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.attachments.clear()
        assert seq.request_id is not None
        del self._live[seq.request_id]

    def _unused_id(self) -> str:
        number = self._num_arrivals
        while f"request-{number}" in self._live:  # somebody chose such a name
            number += 1
        return f"request-{number}"
