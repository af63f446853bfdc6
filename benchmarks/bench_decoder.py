"""A whole decoder step on the CPU kernels, and how much of it is attention and output layer. Random weights, greedy tokens.

    python benchmarks/bench_decoder.py smollm2-135m --kind int8 --cache bfloat16 --batch 1,200 --batch 32,200 --batch 1,1000

Of each batch (sequences, tokens of context) three steps are timed: the whole one; the same without logits, the difference is the
output layer; and one over a single token of context, the difference is attention. Prefill is one sequence of so many new tokens.
"""

import argparse
from collections.abc import Sequence

from op_timing import finish, parser, seconds_of

from minivllm_kernels.cpu.decoder import CpuDecoder
from minivllm_kernels.cpu.packing import KINDS
from minivllm_plugin.bench.report import significant
from minivllm_plugin.models.catalog import resolve
from minivllm_plugin.models.layers import RotaryTable
from minivllm_plugin.models.loader import describe_model
from minivllm_plugin.runner.cpu_weights import decoder_geometry, packed_weights

BLOCK_SIZE = 16
CACHES = ("float32", "bfloat16", "int8")
FILL_AT_ONCE = 512


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    source = resolve(options.model)
    description = describe_model(source, load_format="dummy")
    longest = max(*(context for _, context in options.batch), *options.prefill)
    blocks = max(n * -(-context // BLOCK_SIZE) for n, context in [*options.batch, (1, longest)])
    rows = []
    for kind in options.kind:
        weights = packed_weights(source, description, kind, load_format="dummy", seed=0)
        for cache in options.cache:
            decoder = CpuDecoder(
                decoder_geometry(description.config),
                weights,
                RotaryTable(description.config.rope, description.config.head_dim, longest).cos_sin,
                num_blocks=blocks,
                block_size=BLOCK_SIZE,
                cache_kind=cache,
                threads=options.threads,
            )
            rows += [_decode_row(decoder, kind, cache, n, context, options.seconds) for n, context in options.batch]
            rows += [_prefill_row(decoder, kind, cache, length, options.seconds) for length in options.prefill]
    finish("decoder", f"one step of {options.model}'s shape", options, rows)


def _decode_row(decoder: CpuDecoder, kind: str, cache: str, n: int, context: int, at_least: float) -> dict[str, object]:
    tables = _tables(n, context)
    for table in tables:  # what is attended to must have been written: pages never touched are all one page of zeros
        for start in range(0, context - 1, FILL_AT_ONCE):
            count = min(FILL_AT_ONCE, context - 1 - start)
            decoder.forward([7] * count, [count], [start + count], [table], [])
    tokens, ones, everybody = [11] * n, [1] * n, list(range(n))
    whole = seconds_of(lambda: decoder.forward(tokens, ones, [context] * n, tables, everybody), at_least)
    silent = seconds_of(lambda: decoder.forward(tokens, ones, [context] * n, tables, []), at_least)
    short = seconds_of(lambda: decoder.forward(tokens, ones, ones, tables, []), at_least)
    return _row(f"decode {n} x {context}", kind, cache, whole, whole - silent, silent - short, n)


def _prefill_row(decoder: CpuDecoder, kind: str, cache: str, length: int, at_least: float) -> dict[str, object]:
    table = _tables(1, length)
    tokens = [(index * 7) % 1000 + 5 for index in range(length)]
    whole = seconds_of(lambda: decoder.forward(tokens, [length], [length], table, [length - 1]), at_least)
    silent = seconds_of(lambda: decoder.forward(tokens, [length], [length], table, []), at_least)
    return _row(f"prefill {length}", kind, cache, whole, whole - silent, None, length)


def _row(step: str, kind: str, cache: str, whole: float, head: float, attention: float | None, tokens: int) -> dict[str, object]:
    return {
        "step": step,
        "weights": kind,
        "cache": cache,
        "ms": significant(whole * 1000),
        "output_layer_ms": significant(head * 1000, 3),
        "attention_ms": None if attention is None else significant(attention * 1000, 3),
        "tok_per_s": significant(tokens / whole),
    }


def _tables(n: int, context: int) -> list[list[int]]:
    width = -(-context // BLOCK_SIZE)
    return [list(range(index * width, (index + 1) * width)) for index in range(n)]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("model", nargs="?", default="smollm2-135m", help="whose shape is taken")
    made.add_argument("--kind", action="append", choices=tuple(KINDS), help="of weights; may be repeated; default int8")
    made.add_argument("--cache", action="append", choices=CACHES, help="may be repeated; default bfloat16")
    made.add_argument("--batch", action="append", type=_pair, help="sequences,context; may be repeated")
    made.add_argument("--prefill", action="append", type=int, help="new tokens; may be repeated; default 512")
    options = made.parse_args(arguments)
    options.kind, options.cache = options.kind or ["int8"], options.cache or ["bfloat16"]
    options.batch = options.batch or [(1, 200), (8, 200), (32, 200), (1, 1000), (8, 1000), (32, 1000)]
    options.prefill = options.prefill or [512]
    return options


def _pair(text: str) -> tuple[int, int]:
    n, context = (int(part) for part in text.split(","))
    return n, context


if __name__ == "__main__":
    main()
