"""Running a scheduler to its end, step by step, with nothing left unchecked."""

from collections.abc import Iterable, Mapping

from minivllm_plugin.engine.llm_engine import Runner
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.testing.invariants import InvariantError, assert_invariants
from minivllm_plugin.testing.ledger import BatchRecord

__all__ = ["drive"]


def drive(
    scheduler: Scheduler,
    runner: Runner,
    max_steps: int = 1000,
    *,
    arrivals: Mapping[int, Iterable[Sequence]] | None = None,
) -> list[BatchRecord]:
    """``schedule -> run -> postprocess`` until every sequence has ended, with all invariants checked after each call.

    Args:
        scheduler: with the sequences that are there from the start.
        runner: for example a :class:`~minivllm_plugin.testing.LedgerRunner`.
        max_steps: more steps than this are taken for a livelock.
        arrivals: step number, counted from 0 -> sequences added before that step.

    Returns:
        The batches, in order.

    Raises:
        InvariantError: a promise is broken, there is work but nothing is scheduled, or ``max_steps`` were not enough.
    """
    upcoming = {step: list(sequences) for step, sequences in (arrivals or {}).items()}
    sequences = [*scheduler.waiting, *scheduler.running]
    batches: list[BatchRecord] = []
    step = 0
    while upcoming or not scheduler.is_finished():
        for seq in upcoming.pop(step, ()):
            scheduler.add_sequence(seq)
            sequences.append(seq)
        if step >= max_steps:
            raise InvariantError(f"unfinished after {max_steps} steps: waiting {scheduler.waiting}, running {scheduler.running}")
        batch, is_prefill = scheduler.schedule()
        assert_invariants(scheduler, sequences)
        if batch:
            batches.append(BatchRecord.of(batch, is_prefill))
            scheduler.postprocess(batch, runner.run(batch, is_prefill))
            assert_invariants(scheduler, sequences)
        elif not scheduler.is_finished():
            raise InvariantError(f"nothing is scheduled: waiting {scheduler.waiting}, running {scheduler.running}")
        step += 1
    return batches
