"""Runs batches through a model. Owns weights and KV tensors; asked by the engine, one batch at a time, on its thread.

Knows sequences only as token lists with a block table. One device-to-host transfer a step: the chosen tokens.
"""

from collections.abc import Collection
from typing import TYPE_CHECKING

import torch

from minivllm_kernels.dispatch import BackendTable, using
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.models.loader import LoadedModel
from minivllm_plugin.runner.inputs import build_inputs
from minivllm_plugin.runner.kv_cache import KVCache
from minivllm_plugin.runner.sampler import sample

if TYPE_CHECKING:
    from minivllm_plugin.extensions.logits_pipeline import LogitsPipeline

__all__ = ["ModelRunner"]

IGNORED = 0  # what a sequence gets that was not computed to its end; the scheduler does not look at it


class ModelRunner:
    """A model with its KV cache.

    Args:
        model: weights on their device.
        end_token_ids: tokens that ``min_tokens`` holds back.
        backends: what runs the ops; None is the built-in backends.

    Attributes:
        processors: the logits processors of plugins; None when there are none.
    """

    can_pool = True

    def __init__(self, model: LoadedModel, end_token_ids: Collection[int], backends: BackendTable | None = None) -> None:
        self.model = model
        self.processors: LogitsPipeline | None = None
        self._backends = backends
        self.device = next(model.module.parameters()).device
        self._end_token_ids = frozenset(end_token_ids)
        self._cache: KVCache | None = None

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Take the memory of the pool. The scheduler is built with the geometry of what this returns, nothing else.

        Raises:
            ConfigError: the memory cannot be had.
        """
        self._cache = None
        try:
            self._cache = KVCache.allocate(self.model.config, num_blocks, block_size, self.model.dtype, self.device)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"no memory for num_blocks={num_blocks} KV blocks of {block_size} tokens on {self.device}; "
                "lower num_blocks or kv_cache_bytes"
            ) from error
        return self._cache

    @torch.inference_mode()
    def run(self, seqs: list[Sequence], is_prefill: bool) -> list[int]:
        """One token per sequence; see :class:`minivllm_plugin.engine.llm_engine.Runner`."""
        assert self._cache is not None, "allocate_kv_cache() comes first"
        inputs = build_inputs(seqs, self._cache.block_size, self.device)
        tokens = [IGNORED] * len(seqs)
        with using(self._backends):
            hidden = self.model.module(inputs.token_ids, inputs.positions, self._cache.layers, inputs.metadata)
            wanted = inputs.wanted
            if wanted.pooled:
                for index in wanted.take_embeddings(hidden[torch.tensor(wanted.pooled, device=self.device)], seqs):
                    tokens[index] = FAILED_TOKEN
            if wanted.rows:
                logits = wanted.take_prompt_logprobs(self.model.module.compute_logits(hidden[inputs.logit_rows]), seqs)
            if wanted.sampled:
                chosen = sample(logits, [seqs[index] for index in wanted.sampled], self._end_token_ids, self.processors)
                for index, token in zip(wanted.sampled, chosen, strict=True):
                    tokens[index] = token
        return tokens
