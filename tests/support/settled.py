"""What an engine's counters say once its thread has caught up with the answers that it gave."""

from waiting import wait_until

from minivllm_plugin import LLM
from minivllm_plugin.engine.snapshot import EngineSnapshot

__all__ = ["settled_snapshot"]


def settled_snapshot(llm: LLM) -> EngineSnapshot:
    """The state after every answer that the caller has seen, of an engine with nothing else to do.

    ``LLM.snapshot`` alone is what the thread published last, and it hands answers over before it publishes: on a busy machine the
    caller is the first to look.
    """
    before = llm.snapshot()
    llm.abort("nobody")  # wakes the thread, which publishes anew before it waits
    wait_until(lambda: llm.snapshot() is not before)
    return llm.snapshot()
