"""What the two attention benchmarks share: batches over a paged cache, the contestants that need no kernel of their own, timing.

Contestants are compared before they are timed: one that computes something else is an error, not a row. Triton kernels are
timed on a CUDA device. In a process with ``TRITON_INTERPRET=1`` they run on the CPU, as a check of the script; their times say
nothing there.
"""

import argparse
import importlib.util
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from op_timing import finish, parser, seconds_of
from torch import Tensor

from minivllm_kernels import AttentionMetadata, reference
from minivllm_plugin.bench.report import median, significant

__all__ = ["Batch", "Contestant", "attention_options", "gathered", "run_contest"]

WORK = ("2x60", "1x512", "16x256", "4x2048")
TOLERANCES = {torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 6e-3}
LEAST_CALLS = 20


@dataclass(frozen=True, slots=True)
class Batch:
    """``count`` sequences of ``length`` tokens in shuffled blocks, of which the last ``new`` are queries.

    ``q [T, H, D]``; caches ``[blocks, block size, K, D]``; ``keys`` and ``values [count, length, K, D]`` are the same numbers,
    side by side.
    """

    count: int
    length: int
    new: int
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    keys: Tensor
    values: Tensor
    metadata: AttentionMetadata

    @classmethod
    def random(cls, options: argparse.Namespace, count: int, length: int, new: int) -> "Batch":
        source = torch.Generator().manual_seed(0)
        dtype, device = getattr(torch, options.dtype), options.device

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=source).to(device, dtype)

        width = -(-length // options.block_size)
        tables = torch.randperm(count * width, generator=source).view(count, width)
        metadata = AttentionMetadata.build([new] * count, [length] * count, tables.tolist(), options.block_size, device)
        shape = (count * width, options.block_size, options.kv_heads, options.head_dim)
        k_cache, v_cache = normal(*shape), normal(*shape)
        q = normal(count * new, options.heads, options.head_dim)
        keys, values = (gathered(cache, metadata, length) for cache in (k_cache, v_cache))
        return cls(count, length, new, q, k_cache, v_cache, keys, values, metadata)

    @property
    def scale(self) -> float:
        return float(self.q.shape[2] ** -0.5)

    @property
    def group(self) -> int:
        return self.q.shape[1] // self.k_cache.shape[2]


Contestant = Callable[[Batch], Callable[[], Tensor]]
"""Prepares what its own users would have ready, and returns the call to be timed: ``[T, H, D]``."""


def gathered(cache: Tensor, metadata: AttentionMetadata, length: int) -> Tensor:
    """``[count, length, K, D]`` out of the blocks of each sequence."""
    return cache[metadata.block_tables].flatten(1, 2)[:, :length].contiguous()


def _why_not_triton(device: str) -> str | None:
    """Why Triton kernels cannot take part on this device, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if not device.startswith("cuda") and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the device is {device}"
    return None


def _why_not_flash_attn(options: argparse.Namespace) -> str | None:
    """Why flash-attn cannot take part, or None."""
    if not options.device.startswith("cuda"):
        return f"the device is {options.device}"
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn is not installed"
    return "it has no float32" if options.dtype == "float32" else None


def _contestants(
    options: argparse.Namespace, plain: Contestant, flash: Contestant
) -> tuple[dict[str, Contestant], dict[str, str]]:
    """Who takes part, the first one being what the others are compared with, and who does not, and why."""
    present: dict[str, Contestant] = {"plain torch": plain, "reference": _reference}
    absent: dict[str, str] = {}
    why = _why_not_triton(options.device)
    if why is None:
        present |= {"naive triton": _naive, "ours": _ours}
    else:
        absent |= {"naive triton": why, "ours": why}
    why = _why_not_flash_attn(options)
    if why is None:
        present["flash-attn, contiguous"] = flash
    else:
        absent["flash-attn"] = why
    return present, absent


def _reference(batch: Batch) -> Callable[[], Tensor]:
    return lambda: reference.attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.scale)


def _ours(batch: Batch) -> Callable[[], Tensor]:
    from minivllm_kernels.triton.attention import attention

    return lambda: attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.scale)


def _naive(batch: Batch) -> Callable[[], Tensor]:
    from naive_attention import naive_attention

    return lambda: naive_attention(batch.q, batch.k_cache, batch.v_cache, batch.metadata, batch.scale)


def run_contest(
    name: str,
    options: argparse.Namespace,
    plain: Contestant,
    flash: Contestant,
    batch_of: Callable[[int, int], Batch],
    rate: Callable[[Batch], tuple[str, float]],
) -> None:
    """Compare, time and report all contestants on all of ``--work``.

    Args:
        plain, flash: what plain torch and flash-attn do; the others are the same in both benchmarks.
        rate: what a batch amounts to, and the name of the column that has it by the second.
    """
    contestants, absent = _contestants(options, plain, flash)
    for who, why in absent.items():
        print(f"{who} does not take part: {why}")
    rows: list[dict[str, Any]] = []
    for count, length in options.work:
        batch = batch_of(count, length)
        unit, amount = rate(batch)
        expected, first = None, None
        for who, prepare in contestants.items():
            call = prepare(batch)
            got = call().float()
            if expected is None:
                expected = got
            difference = (got - expected).abs().max().item()
            if not difference < TOLERANCES[batch.q.dtype]:
                raise SystemExit(f"{who} on {count}x{length} is {difference} away from {next(iter(contestants))}")
            seconds = _seconds_of(call, options)
            first = first or seconds
            rows.append(
                {
                    "work": f"{count}x{length}",
                    "contestant": who,
                    "microseconds": significant(seconds * 1e6, 3),
                    unit: significant(amount / seconds, 3),
                    "times_the_first": significant(first / seconds, 3),
                }
            )
    where = torch.cuda.get_device_name(options.device) if options.device.startswith("cuda") else options.device
    shape = f"{options.heads} heads, {options.kv_heads} KV heads, size {options.head_dim}, blocks of {options.block_size}"
    interpreted = ", kernels interpreted" if os.environ.get("TRITON_INTERPRET") == "1" else ""
    finish(name, f"{shape}, {options.dtype} on {where}{interpreted}", options, rows)


def _seconds_of(call: Callable[[], object], options: argparse.Namespace) -> float:
    """Median of a call; on a GPU by its own clock, so that launches are not counted where they are hidden."""
    if not options.device.startswith("cuda"):
        return seconds_of(call, options.seconds)
    call()
    torch.cuda.synchronize()
    taken: list[float] = []
    while len(taken) < LEAST_CALLS or sum(taken) < options.seconds:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(LEAST_CALLS + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.cuda.synchronize()
        taken += [before.elapsed_time(after) / 1000 for before, after in pairwise(marks)]
    return median(taken)


def attention_options(text: str | None, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of both, parsed."""
    made = parser(text)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made.add_argument("--work", action="extend", nargs="+", type=_work, help=f"sequences x tokens; default {' '.join(WORK)}")
    made.add_argument("--heads", type=int, default=32)
    made.add_argument("--kv-heads", type=int, default=8)
    made.add_argument("--head-dim", type=int, default=128)
    made.add_argument("--block-size", type=int, default=16)
    made.add_argument("--device", default=device)
    made.add_argument(
        "--dtype", default="bfloat16" if device == "cuda" else "float32", choices=("float32", "bfloat16", "float16")
    )
    options = made.parse_args(arguments)
    options.work = options.work or [_work(work) for work in WORK]
    torch.set_num_threads(options.threads)
    return options


def _work(text: str) -> tuple[int, int]:
    count, length = (int(part) for part in text.split("x"))
    return count, length
