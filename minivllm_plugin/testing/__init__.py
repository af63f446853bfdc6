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
:func:`scripted_llm` puts the real engine thread and streams on top; only that loads the serving half, and only when it is used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from minivllm_plugin.testing.choosers import ChooseToken, HashedTokens, ScriptedLogits, ScriptedTokens
from minivllm_plugin.testing.driving import drive
from minivllm_plugin.testing.invariants import InvariantError, assert_invariants, check_pool
from minivllm_plugin.testing.ledger import BatchRecord, LedgerRunner, RowRecord

if TYPE_CHECKING:
    from minivllm_plugin.testing.live import scripted_llm

__all__ = [
    "BatchRecord",
    "ChooseToken",
    "HashedTokens",
    "InvariantError",
    "LedgerRunner",
    "RowRecord",
    "ScriptedLogits",
    "ScriptedTokens",
    "assert_invariants",
    "check_pool",
    "drive",
    "scripted_llm",
]


def __getattr__(name: str) -> Any:
    if name != "scripted_llm":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("minivllm_plugin.testing.live").scripted_llm
