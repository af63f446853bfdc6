"""The attention op over the paged cache: which rows go to which kernel, decided once a pass and kept in ``metadata.scratch``.

Sequences with one new token go to :mod:`~minivllm_kernels.triton.attention_decode`, the others to
:mod:`~minivllm_kernels.triton.attention_prefill`: a mixed batch is two launches, three with long contexts, that write different
rows of one output. Two kernels rather than one, because a decoding row wants its context split over many programs and a tile of
16 rows, and a prompt wants large tiles. Runs on the engine thread, may be inside the capture of a CUDA graph (every sequence
has one new token then and nothing is copied to the device), and never waits for the device.
"""

from dataclasses import dataclass, field
from functools import cache

import torch
from torch import Tensor

from minivllm_kernels.metadata import AttentionMetadata
from minivllm_kernels.triton.attention_decode import Splits, decode, plan_splits
from minivllm_kernels.triton.attention_inputs import AttentionInputs
from minivllm_kernels.triton.attention_prefill import prefill, tile_table, tokens_a_tile
from minivllm_kernels.triton.attention_tuning import decode_choice, prefill_choice

__all__ = ["attention"]

SCRATCH = "triton.attention"
SMS_OF_A_CPU = 8  # as many programs as the interpreter is asked to share long contexts among


@dataclass(slots=True)
class _Plan:
    """What all layers of a pass share.

    Attributes:
        num_decodes: sequences of one new token.
        decode_rows: int32 ``[num_decodes]``, which they are; None if it is all of them.
        tables: int32 ``[n, 2]`` of programs, by tokens a program.
        splits: room for partial results, by shape; layers use it one after another.
    """

    num_decodes: int
    decode_rows: Tensor | None
    tables: dict[int, Tensor] = field(default_factory=dict)
    splits: dict[tuple[int, ...], Splits] = field(default_factory=dict)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    scale: float,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Tensor:
    """See :func:`minivllm_kernels.attention`. q may be strided; the caches may be 8-bit floats.

    Args:
        k_scale, v_scale: what a key and a value of an 8-bit cache is multiplied by, as :func:`store_kv` divided it.

    Raises:
        ValueError: see :class:`~minivllm_kernels.triton.attention_inputs.AttentionInputs`.
    """
    inputs = AttentionInputs.checked(q, k_cache, v_cache, metadata, scale, k_scale, v_scale)
    if q.shape[0] == 0:
        return inputs.out
    plan = metadata.scratch.get(SCRATCH)
    if plan is None:
        plan = metadata.scratch[SCRATCH] = _plan(metadata, q.device)
    if plan.num_decodes:
        tiles = decode_choice(inputs)
        key = (q.shape[1], k_cache.shape[2], q.shape[2])
        splits = plan.splits.get(key)
        if splits is None:
            splits = plan.splits[key] = plan_splits(inputs, plan.num_decodes, tiles, _num_sms(q.device))
        decode(inputs, plan.decode_rows, plan.num_decodes, splits, tiles)
    if plan.num_decodes < len(metadata.query_lens):
        tiles = prefill_choice(inputs)
        tokens = tokens_a_tile(inputs, tiles)
        table = plan.tables.get(tokens)
        if table is None:
            rows = tile_table(metadata.query_lens, metadata.seq_lens, tokens)
            table = plan.tables[tokens] = _to_device(rows, q.device)
        prefill(inputs, table, tiles)
    return inputs.out


def _plan(metadata: AttentionMetadata, device: torch.device) -> _Plan:
    decodes = [b for b, new in enumerate(metadata.query_lens) if new == 1]
    everybody = len(decodes) == len(metadata.query_lens)
    return _Plan(len(decodes), _to_device(decodes, device) if decodes and not everybody else None)


def _to_device(numbers: object, device: torch.device) -> Tensor:
    """int32, by way of pinned memory: the host does not wait for the copy."""
    if device.type == "cpu":
        return torch.tensor(numbers, dtype=torch.int32)
    return torch.tensor(numbers, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)


@cache
def _num_sms(device: torch.device) -> int:
    if device.type == "cpu":
        return SMS_OF_A_CPU
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
