"""Public test kit: exercise the engine, a policy or a plugin without weights, torch or a clock.

::

    from minivllm_plugin.engine.scheduler import Scheduler
    from minivllm_plugin.engine.sequence import Sequence
    from minivllm_plugin.testing import LedgerRunner, drive

    scheduler = Scheduler(8, 64, 32, 4, 0, enable_chunked_prefill=True)
    scheduler.add_sequence(Sequence([5, 6, 7], request_id="a"))
    batches = drive(scheduler, LedgerRunner.for_scheduler(scheduler))

:class:`LedgerRunner` stands in for a model: it keeps a ledger of what was written into each KV slot and refuses to go on when
a sequence would read anything but its own tokens. :func:`check_pool` and :func:`assert_invariants` look at queues and blocks,
:func:`drive` runs a scheduler to its end and calls both after every step. Whatever they find is an :class:`InvariantError`.
:func:`scripted_llm` puts the real engine thread and streams on top, and :class:`LogitsRunner` gives it logits; only these load
the serving half and torch, and only when they are used. :func:`simulate` runs a trace of requests under a virtual clock.
"""

import importlib
from typing import TYPE_CHECKING, Any

from minivllm_plugin.testing.choosers import ChooseToken, HashedTokens, RepeatingTokens, ScriptedLogits, ScriptedTokens
from minivllm_plugin.testing.clock import VirtualClock
from minivllm_plugin.testing.driving import drive
from minivllm_plugin.testing.folding import FoldedBlock, FoldedBlocks
from minivllm_plugin.testing.invariants import InvariantError, assert_invariants, check_pool
from minivllm_plugin.testing.ledger import BatchRecord, LedgerRunner, RowRecord
from minivllm_plugin.testing.recorder import EventRecorder, RecordedRequest

if TYPE_CHECKING:
    from minivllm_plugin.simulation.run import simulate
    from minivllm_plugin.testing.live import scripted_llm
    from minivllm_plugin.testing.logits import HashedLogits, LogitsRunner

__all__ = [
    "BatchRecord",
    "ChooseToken",
    "EventRecorder",
    "FoldedBlock",
    "FoldedBlocks",
    "HashedLogits",
    "HashedTokens",
    "InvariantError",
    "LedgerRunner",
    "LogitsRunner",
    "RecordedRequest",
    "RepeatingTokens",
    "RowRecord",
    "ScriptedLogits",
    "ScriptedTokens",
    "VirtualClock",
    "assert_invariants",
    "check_pool",
    "drive",
    "scripted_llm",
    "simulate",
]


_HEAVY = {  # they load the serving half, torch, or the simulator
    "scripted_llm": "minivllm_plugin.testing.live",
    "HashedLogits": "minivllm_plugin.testing.logits",
    "LogitsRunner": "minivllm_plugin.testing.logits",
    "simulate": "minivllm_plugin.simulation.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HEAVY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HEAVY[name]), name)
