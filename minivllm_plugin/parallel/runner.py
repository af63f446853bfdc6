"""Rank 0: runs batches together with the other ranks, and is the engine's only view of all of them.

Every rank computes the same batch on its part of the model; what comes after the logits (sampling, log-probabilities, penalties,
structured output, embeddings) happens here alone. Called on the engine thread.
"""

import time
from typing import TYPE_CHECKING

import torch

from minivllm_kernels.dispatch import using
from minivllm_plugin.engine.runner import RunnerAnswers
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.errors import RankFailedError
from minivllm_plugin.parallel.context import LostPeerError
from minivllm_plugin.parallel.groups import PATIENCE
from minivllm_plugin.parallel.messages import encode_layout

if TYPE_CHECKING:
    from collections.abc import Callable

    from minivllm_plugin.extensions.logits_pipeline import LogitsPipeline
    from minivllm_plugin.parallel.groups import ProcessGroup
    from minivllm_plugin.parallel.ranks import Ranks
    from minivllm_plugin.runner.kv_cache import KVCache
    from minivllm_plugin.runner.model_runner import ModelRunner
    from minivllm_plugin.runner.step_counts import StepCounts

__all__ = ["TensorParallelRunner"]


class TensorParallelRunner:
    """A :class:`minivllm_plugin.engine.llm_engine.Runner` over several processes.

    It has no ``launch``: a batch that continues with a token which only rank 0's device knows is one that no other rank could
    compute.

    Args:
        local: rank 0's part of the model, with its pool.
        ranks: the other ranks, with theirs.
        group: the collectives that connect them.
        cache: rank 0's pool; the others have as many blocks.
    """

    can_pool = True

    def __init__(self, local: "ModelRunner", ranks: "Ranks", group: "ProcessGroup", cache: "KVCache") -> None:
        self.cache = cache
        self._local = local
        self._ranks = ranks
        self._is_out_of_step = False
        ranks.call_on_failure(lambda _: group.abort())

    @property
    def dtype(self) -> str:
        """Of the weights, such as ``bfloat16``."""
        return str(self._local.model.dtype).removeprefix("torch.")

    def explain(self) -> dict[str, str]:
        """Op -> what computes it, and how steps are launched, on rank 0; the others have the same settings."""
        return self._local.explain()

    @property
    def counts(self) -> "StepCounts":
        """How many steps of rank 0 were replayed, and why others were not."""
        return self._local.counts

    @property
    def processors(self) -> "LogitsPipeline | None":
        """The logits processors of plugins; None when there are none."""
        return self._local.processors

    @processors.setter
    def processors(self, processors: "LogitsPipeline | None") -> None:
        self._local.processors = processors

    @torch.inference_mode()
    def run(self, seqs: list[Sequence], is_prefill: bool) -> RunnerAnswers:
        """One token per sequence; see :class:`minivllm_plugin.engine.llm_engine.Runner`.

        Raises:
            RankFailedError: another rank died, before or during this step, or an earlier step was left in the middle.
        """
        if self._is_out_of_step:
            raise RankFailedError("an earlier step failed, so the ranks may be at different places in it; make a new engine")
        with self._ranks.explained(), using(self._local.backends):
            began = time.monotonic()
            layout = self._local.lay_out(seqs)
            self._is_out_of_step = True
            self._ranks.broadcast(encode_layout(layout))
            hidden, inputs = self._local.forward(layout)
            tokens = self._local.choose(hidden, inputs, layout, seqs).wait()
            if time.monotonic() - began > PATIENCE.total_seconds():  # nccl gives a rank up without a word, and goes on
                raise LostPeerError(f"a step took longer than {PATIENCE}: another rank stands still")
            self._is_out_of_step = False
            return tokens

    def call_on_failure(self, function: "Callable[[RankFailedError], None]") -> None:
        """Have ``function`` called, on another thread, as soon as a rank has died: between two steps nobody else notices."""
        self._ranks.call_on_failure(function)

    def process_ids(self) -> list[int]:
        """Of the ranks from 1 on."""
        return self._ranks.process_ids()

    def close(self) -> None:
        """End the other ranks; returns when they are gone."""
        self._ranks.close()
