"""Batches that nobody asked for, as large as they can come: they show what memory a step takes, and have its kernels compiled.

They read one block of a pool of one block, and write nowhere.
"""

from functools import partial

import torch

import minivllm_kernels as kernels
from minivllm_kernels import DrawTensors, TokenDraw
from minivllm_kernels.dispatch import BackendTable, using
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.models.loader import LoadedModel
from minivllm_plugin.runner.device_inputs import InputBuffers
from minivllm_plugin.runner.kv_cache import KVCache
from minivllm_plugin.runner.memory import MemoryPlan, MemoryProbe, plan_memory
from minivllm_plugin.runner.rows import LogitRows
from minivllm_plugin.runner.step_layout import StepLayout

__all__ = ["decode_layout", "largest_layout", "measure"]

NO_SLOT = -1
FIRST_BLOCK = 0
DRAW = TokenDraw(0.5, top_k=50, top_p=0.9)


def measure(
    model: LoadedModel,
    config: EngineConfig,
    cache_dtype: torch.dtype,
    backends: BackendTable | None,
    probe: MemoryProbe,
    *,
    has_graphs: bool,
) -> MemoryPlan:
    """Where the memory of the model's device goes when the scheduler gives all that ``config`` allows.

    Raises:
        ConfigError: see :func:`minivllm_plugin.runner.memory.plan_memory`.
    """
    device = next(model.module.parameters()).device
    window = config.max_model_len or model.config.max_position_embeddings
    largest = largest_layout(config.max_num_batched_tokens, config.max_num_sequences, window, config.block_size)
    decode = decode_layout(config.max_num_sequences, min(window, config.max_num_batched_tokens), config.block_size)

    @torch.inference_mode()
    def compute(layout: StepLayout) -> None:
        cache = KVCache.allocate(model.cache_config, 1, config.block_size, cache_dtype, device)
        inputs = InputBuffers(device).upload(layout, config.block_size, None)
        with using(backends):
            hidden = model.module(inputs.token_ids, inputs.positions, cache.layers, inputs.metadata)
            logits = model.module.compute_logits(hidden.index_select(0, inputs.logit_rows))
            if logits.shape[1]:  # ranks behind the first have none
                kernels.sample_rows(logits, DrawTensors.build([DRAW] * logits.shape[0], device))

    decoding = partial(compute, decode) if has_graphs else None
    return plan_memory(probe, config.gpu_memory_utilization, partial(compute, largest), decoding, str(device))


def largest_layout(num_tokens: int, num_rows: int, max_model_len: int, block_size: int) -> StepLayout:
    """Prompts of ``num_tokens`` in all, each as long as it may be, with logits of ``num_rows`` rows."""
    lengths = [max_model_len] * (num_tokens // max_model_len)
    if num_tokens % max_model_len:
        lengths.append(num_tokens % max_model_len)
    return _layout(lengths, lengths, min(num_rows, num_tokens), block_size)


def decode_layout(num_sequences: int, length: int, block_size: int) -> StepLayout:
    """A step of ``num_sequences`` that have ``length`` tokens each."""
    return _layout([1] * num_sequences, [length] * num_sequences, num_sequences, block_size)


def _layout(query_lens: list[int], seq_lens: list[int], num_rows: int, block_size: int) -> StepLayout:
    num_tokens = sum(query_lens)
    return StepLayout(
        token_ids=[0] * num_tokens,
        positions=[position for new, total in zip(query_lens, seq_lens, strict=True) for position in range(total - new, total)],
        slots=[NO_SLOT] * num_tokens,
        sources=[],
        query_lens=tuple(query_lens),
        seq_lens=tuple(seq_lens),
        block_tables=[[FIRST_BLOCK] * -(-length // block_size) for length in seq_lens],
        wanted=LogitRows.of_rows(list(range(num_rows))),
    )
