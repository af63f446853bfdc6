"""Runs logits processors on a batch. One of these per engine, called by the sampler on the engine thread.

What a request needs between steps stands on its Sequence, so it survives preemption and ends with the request. A failing
processor fails its own request and no other: batches are computed on a copy, and asked again row by row if they fail.
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceABC

import torch
from torch import Tensor

from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.extensions.extra_args import FailureLog
from minivllm_plugin.extensions.logits import LogitsProcessor, LogitsProcessorRegistry, LogitsRow
from minivllm_plugin.extensions.requests import TokenView, request_start
from minivllm_plugin.runner.sampler import GREEDY_BELOW

__all__ = ["LogitsPipeline"]

KEY = "logits"


class _BrokenContractError(Exception):
    """A processor broke its contract in a way that raised nothing by itself."""


class LogitsPipeline:
    """The processors of one engine, in order.

    Args:
        registry: what is in it now is used; later additions are not.
    """

    def __init__(self, registry: LogitsProcessorRegistry) -> None:
        self._processors: tuple[tuple[str, LogitsProcessor], ...] = tuple(registry.items().items())
        self._described = {name: registry.describe(name) for name, _ in self._processors}
        self._log = FailureLog()

    def apply(self, logits: Tensor, seqs: SequenceABC[Sequence]) -> None:
        """Let every row be changed by the processors that its request asks for, in place.

        Args:
            logits: float32 ``[S, V]``. A row whose processor failed is NaN afterwards and its sequence's ``failure`` says why.
            seqs: the sequence of each row.
        """
        wanted: dict[str, list[tuple[int, LogitsRow]]] = {}
        for index, seq in enumerate(seqs):
            if not seq.sampling_params.extra_args:
                continue
            rows = seq.attachments.get(KEY)
            if rows is None:
                rows = seq.attachments[KEY] = self._start(seq)
            if seq.failure is not None:
                logits[index] = torch.nan
                continue
            if rows and not self._may_skip(seq, rows):
                for name, row in rows.items():
                    wanted.setdefault(name, []).append((index, row))
        if not wanted:
            return
        for name, processor in self._processors:
            rows_of_one = [(index, row) for index, row in wanted.get(name, ()) if seqs[index].failure is None]
            if rows_of_one:
                self._run(name, processor, logits, seqs, rows_of_one)

    def _start(self, seq: Sequence) -> dict[str, LogitsRow]:
        """The rows of a request that is sampled for the first time; its states are made here."""
        rows: dict[str, LogitsRow] = {}
        asked = seq.sampling_params.extra_args or {}
        prompt: tuple[int, ...] | None = None
        for name, processor in self._processors:
            if name not in asked:
                continue
            start = request_start(seq, asked[name])
            prompt = prompt or start.prompt_token_ids
            try:
                state = processor.new_state(start)
            except Exception as error:  # a plugin's own code
                self._fail(name, seq, error)
                return {}
            completion = TokenView(seq.token_ids, seq.num_prompt_tokens)
            rows[name] = LogitsRow(start.request_id, asked[name], state, prompt, completion)
        return rows

    def _may_skip(self, seq: Sequence, rows: Iterable[str]) -> bool:
        return seq.sampling_params.temperature < GREEDY_BELOW and all(
            processor.argmax_invariant for name, processor in self._processors if name in rows
        )

    def _run(
        self,
        name: str,
        processor: LogitsProcessor,
        logits: Tensor,
        seqs: SequenceABC[Sequence],
        rows: list[tuple[int, LogitsRow]],
    ) -> None:
        repeatable = bool(getattr(processor, "repeatable", False))
        together = [entry for entry in rows if repeatable or entry[1].state is None]
        if len(together) < 2 or not _run_together(processor, logits, together):
            alone = rows
        else:
            alone = [] if len(together) == len(rows) else [entry for entry in rows if entry[1].state is not None]
        for index, row in alone:
            try:
                _run_alone(processor, logits, index, row)
            except Exception as error:  # a plugin's own code
                logits[index] = torch.nan
                self._fail(name, seqs[index], error)

    def _fail(self, name: str, seq: Sequence, error: Exception) -> None:
        cause = str(error) if isinstance(error, _BrokenContractError) else f"{type(error).__name__}: {error}"
        seq.failure = f"{self._described[name]} failed: {cause}"
        self._log.write(name, seq.request_id, seq.failure, error)


def _run_together(processor: LogitsProcessor, logits: Tensor, rows: list[tuple[int, LogitsRow]]) -> bool:
    """All rows in one call. False, with ``logits`` as they were, if anything about it failed."""
    indices = torch.tensor([index for index, _ in rows], device=logits.device)
    part = logits.index_select(0, indices)
    try:
        changed = _checked(processor.apply(part, [row for _, row in rows]), part)
    except Exception:  # which row it was shows when they are asked one by one
        return False
    if _broken(changed, logits.index_select(0, indices)):
        return False
    logits.index_copy_(0, indices, changed)
    return True


def _run_alone(processor: LogitsProcessor, logits: Tensor, index: int, row: LogitsRow) -> None:
    before = logits[index : index + 1]
    part = before.clone()
    changed = _checked(processor.apply(part, [row]), part)
    reason = _broken(changed, before)
    if reason is not None:
        raise _BrokenContractError(reason)
    before.copy_(changed)


def _checked(returned: Tensor | None, given: Tensor) -> Tensor:
    if returned is None:
        returned = given
    if not isinstance(returned, Tensor) or returned.ndim != 2:
        raise _BrokenContractError(f"apply() must return None or a tensor of shape [rows, vocabulary], got {returned!r:.100}")
    return returned.to(device=given.device, dtype=given.dtype)


def _broken(changed: Tensor, before: Tensor) -> str | None:
    """What a processor did that leaves nothing to choose from; what was so before is not its fault."""
    if changed.shape != before.shape:
        return f"it turned logits of shape {list(before.shape)} into {list(changed.shape)}"
    peaks = changed.amax(dim=1)  # NaN if there is one in the row
    bad = ~peaks.isfinite()
    if not bool(bad.any()):
        return None
    bad &= before.amax(dim=1).isfinite()
    if not bool(bad.any()):
        return None
    peak = float(peaks[bad][0])
    if peak != peak:
        return "it made a logit NaN"
    return "it made a logit +inf" if peak > 0 else "it left no token that may be chosen"
