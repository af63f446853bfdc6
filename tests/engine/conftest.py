"""What the engine's tests share: short sequences, the four modes, and a run to the end with everything checked."""

from collections.abc import Callable
from typing import Any

import pytest

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import BatchRecord, LedgerRunner, drive


@pytest.fixture(
    params=[(False, True), (False, False), (True, True), (True, False)],
    ids=["classic-cache", "classic-nocache", "mixed-cache", "mixed-nocache"],
)
def mode(request: pytest.FixtureRequest) -> dict[str, bool]:
    """Keywords of a scheduler: alternating or mixed batches, with and without prefix cache."""
    chunked, cached = request.param
    return {"enable_chunked_prefill": chunked, "enable_prefix_caching": cached}


@pytest.fixture
def sequence() -> Callable[..., Sequence]:
    """``sequence(length, start=1, request_id=None, **fields)``: a prompt of consecutive ids, 8 tokens wanted, EOS ignored."""

    def make(
        length: int, start: int = 1, request_id: str | None = None, *, priority: int = 0, salt: str | None = None, **params: Any
    ) -> Sequence:
        params = {"max_tokens": 8, "ignore_eos": True, **params}
        return Sequence(
            list(range(start, start + length)),
            sampling_params=SamplingParams(**params),
            request_id=request_id,
            priority=priority,
            cache_salt=salt,
        )

    return make


@pytest.fixture
def run_all() -> Callable[..., list[BatchRecord]]:
    """``run_all(scheduler, sequences, max_steps=300)``: the batches; the pool must be whole at the end."""

    def run(scheduler: Scheduler, sequences: list[Sequence], max_steps: int = 300) -> list[BatchRecord]:
        for seq in sequences:
            scheduler.add_sequence(seq)
        batches = drive(scheduler, LedgerRunner.for_scheduler(scheduler), max_steps)
        assert scheduler.block_manager.num_free_blocks == scheduler.block_manager.num_blocks
        return batches

    return run
