"""Which configuration of the attention kernels is used: the default of the card, or, with ``MINIVLLM_TUNE=1``, the fastest of a
few.

Without the variable nothing is measured, so that nothing delays the first token and two machines with one card compute alike.
With it, the candidates of a shape are measured once a card, on a made-up batch of its own, and the choice is remembered
(:mod:`minivllm_kernels.triton.autotune`); never inside the capture of a CUDA graph.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from minivllm_kernels.metadata import AttentionMetadata
from minivllm_kernels.triton import autotune
from minivllm_kernels.triton.attention_configurations import Tiles, decode_tiles, prefill_tiles
from minivllm_kernels.triton.attention_decode import decode, plan_splits
from minivllm_kernels.triton.attention_inputs import AttentionInputs
from minivllm_kernels.triton.attention_prefill import prefill, tile_table, tokens_a_tile

__all__ = ["ENVIRONMENT_VARIABLE", "decode_choice", "prefill_choice"]

ENVIRONMENT_VARIABLE = "MINIVLLM_TUNE"
PROMPTS, PROMPT_TOKENS = 4, 1024
DECODES, CONTEXT = 64, 1024


def prefill_choice(inputs: AttentionInputs) -> Tiles:
    """For the shape of ``inputs``."""
    candidates = prefill_tiles(inputs.capability, inputs.q.shape[2], inputs.element_bits, inputs.kv_bits)
    return _choose("attention_prefill", inputs, candidates, _prefill_launch)


def decode_choice(inputs: AttentionInputs) -> Tiles:
    """For the shape of ``inputs``."""
    candidates = decode_tiles(inputs.q.shape[2], inputs.element_bits, inputs.kv_bits, inputs.group)
    return _choose("attention_decode", inputs, candidates, _decode_launch)


def _choose(
    op: str,
    inputs: AttentionInputs,
    candidates: Sequence[Tiles],
    launch_of: Callable[[AttentionInputs, Tiles], Callable[[], None]],
) -> Tiles:
    if not os.environ.get(ENVIRONMENT_VARIABLE) or len(candidates) == 1:
        return candidates[0]

    def measure(index: int) -> float:
        return autotune.milliseconds(launch_of(inputs, candidates[index]))

    names = [str(tiles) for tiles in candidates]
    return candidates[autotune.choose(op, inputs.shape(), names, measure, inputs.q.device)]


def _prefill_launch(inputs: AttentionInputs, tiles: Tiles) -> Callable[[], None]:
    made = _batch(inputs, [PROMPT_TOKENS] * PROMPTS, [PROMPT_TOKENS] * PROMPTS)
    metadata = made.metadata
    rows = tile_table(metadata.query_lens, metadata.seq_lens, tokens_a_tile(made, tiles))
    table = torch.tensor(rows, dtype=torch.int32, device=made.q.device)
    return lambda: prefill(made, table, tiles)


def _decode_launch(inputs: AttentionInputs, tiles: Tiles) -> Callable[[], None]:
    made = _batch(inputs, [1] * DECODES, [CONTEXT] * DECODES)
    num_sms = torch.cuda.get_device_properties(made.q.device).multi_processor_count
    splits = plan_splits(made, DECODES, tiles, num_sms)
    return lambda: decode(made, None, DECODES, splits, tiles)


def _batch(inputs: AttentionInputs, query_lens: Sequence[int], seq_lens: Sequence[int]) -> AttentionInputs:
    """A batch of the same shape over caches of its own, zeros: what is stored does not change how long it takes."""
    size = inputs.metadata.block_size
    blocks, tables = 0, []
    for length in seq_lens:
        count = -(-length // size)
        tables.append(range(blocks, blocks + count))
        blocks += count
    device = inputs.q.device
    caches = [torch.zeros((blocks, *inputs.keys.shape[1:]), dtype=inputs.keys.dtype, device=device) for _ in range(2)]
    q = torch.zeros((sum(query_lens), *inputs.q.shape[1:]), dtype=inputs.q.dtype, device=device)
    metadata = AttentionMetadata.build(query_lens, seq_lens, tables, size, device)
    return replace(
        inputs,
        q=q,
        keys=caches[0],
        values=caches[1],
        out=torch.empty_like(q),
        metadata=metadata,
        tables=metadata.block_tables.to(torch.int32),
    )
