"""A whole decoder step on the CPU kernels, piece by piece. Random weights, greedy tokens.

    python benchmarks/bench_decoder.py smollm2-135m --kind int8 --cache bfloat16 --batch 1,200 --batch 32,200 --batch 1,1000

A batch is so many sequences that each add a token to so much context; prefill is one sequence of so many new tokens. Every piece
of the step stands beside its floor: what it must read, at the speed of memory, or multiply, at that of the processor, whichever
takes longer. Both speeds are measured first.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass

from bench_machine import PEAKS, build_machine, peaks, reads
from op_timing import finish, parser, seconds_of

from minivllm_kernels.cpu.decoder import PIECES, CpuDecoder, DecoderGeometry
from minivllm_kernels.cpu.packing import KINDS
from minivllm_plugin.bench.report import median, significant
from minivllm_plugin.models.catalog import resolve
from minivllm_plugin.models.layers import RotaryTable
from minivllm_plugin.models.loader import describe_model
from minivllm_plugin.runner.cpu_weights import decoder_geometry, packed_weights

BLOCK_SIZE = 16
CACHES = ("float32", "bfloat16", "int8")
BYTES_OF = {"float32": 4.0, "bfloat16": 2.0, "bfloat16_dot": 2.0, "int8": 1.0, "int4": 0.625}
PRODUCTS_OF = {"int8": "int8 products", "int4": "int8 products", "bfloat16_dot": "bfloat16 products"}
MEGABYTES = 135  # read to learn the speed of memory: SmolLM2-135M in int8
FILL_AT_ONCE = 512


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    config = describe_model(resolve(options.model), load_format="dummy").config
    longest = max(*(context for _, context in options.batch), *options.prefill)
    blocks = max(n * -(-context // BLOCK_SIZE) for n, context in [*options.batch, (1, longest)])
    machine = build_machine()
    bytes_per_s = 1e9 * median(reads(machine, MEGABYTES, options.threads, options.seconds))
    products_per_s = {what: 1e9 * median(peaks(machine, what, options.threads, options.seconds)) for what in PEAKS}
    rows: list[dict[str, object]] = []
    for kind in options.kind:
        for cache in options.cache:
            decoder = open_decoder(options.model, kind, cache, num_blocks=blocks, longest=longest, threads=options.threads)
            work = Work(decoder.geometry, config.num_layers, kind, cache, bytes_per_s, products_per_s)
            for n, context in options.batch:
                rows += _decode_rows(decoder, work, n, context, options.seconds)
            for length in options.prefill:
                rows += _prefill_rows(decoder, work, length, options.seconds)
    finish("decoder", f"one step of {options.model}'s shape", options, rows)


def open_decoder(model: str, kind: str, cache: str, *, num_blocks: int, longest: int, threads: int) -> CpuDecoder:
    """A decoder of the model's shape with random weights of one kind, ready for sequences of up to ``longest`` tokens."""
    source = resolve(model)
    description = describe_model(source, load_format="dummy")
    return CpuDecoder(
        decoder_geometry(description.config),
        packed_weights(source, description, kind, load_format="dummy", seed=0),
        RotaryTable(description.config.rope, description.config.head_dim, longest).cos_sin,
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        cache_kind=cache,
        threads=threads,
    )


def _decode_rows(decoder: CpuDecoder, what: "Work", n: int, context: int, at_least: float) -> list[dict[str, object]]:
    tables = _tables(n, context)
    for table in tables:  # what is attended to must have been written: pages never touched are all one page of zeros
        for start in range(0, context - 1, FILL_AT_ONCE):
            count = min(FILL_AT_ONCE, context - 1 - start)
            decoder.forward([7] * count, [count], [start + count], [table], [])
    tokens, ones, everybody = [11] * n, [1] * n, list(range(n))
    took = step_pieces(decoder, lambda: decoder.forward(tokens, ones, [context] * n, tables, everybody), at_least)
    return what.rows(f"decode {n} x {context}", took, n, n, n * context)


def _prefill_rows(decoder: CpuDecoder, what: "Work", length: int, at_least: float) -> list[dict[str, object]]:
    table = _tables(1, length)
    tokens = [(index * 7) % 1000 + 5 for index in range(length)]
    took = step_pieces(decoder, lambda: decoder.forward(tokens, [length], [length], table, [length - 1]), at_least)
    return what.rows(f"prefill {length}", took, length, 1, length * (length + 1) // 2)


def step_pieces(decoder: CpuDecoder, call: Callable[[], object], at_least: float) -> dict[str, float]:
    """Median seconds of the whole step, and of its pieces."""
    taken: list[dict[str, float]] = []

    def once() -> None:
        call()
        taken.append(decoder.seconds_of_pieces())

    decoder.seconds_of_pieces()
    whole = seconds_of(once, at_least)
    return {"whole step": whole, **{piece: median([one[piece] for one in taken[1:]]) for piece in PIECES}}


@dataclass(frozen=True, slots=True)
class Work:
    """What a step of one shape must read and multiply at least, and what the machine does of that a second."""

    geometry: DecoderGeometry
    num_layers: int
    kind: str
    cache: str
    bytes_per_s: float
    products_per_s: Mapping[str, float]

    def rows(self, step: str, took: Mapping[str, float], tokens: int, sampled: int, seen: int) -> list[dict[str, object]]:
        """One per piece. ``seen``: pairs of a token and one that it attends to."""
        needs = self.needs(tokens, sampled, seen)
        return [
            {
                "step": step,
                "weights": self.kind,
                "cache": self.cache,
                "piece": piece,
                "ms": significant(seconds * 1000, 3),
                **self._floor(needs.get(piece), seconds),
                "tok_per_s": significant(tokens / seconds) if piece == "whole step" else None,
            }
            for piece, seconds in took.items()
        ]

    def _floor(self, need: "Need | None", seconds: float) -> dict[str, object]:
        if need is None or not need.read:
            return dict.fromkeys(("reads_MB", "read_floor_ms", "M_multiply_adds", "multiply_floor_ms", "times_the_floor"))
        reading, multiplying = need.read / self.bytes_per_s, need.multiply_seconds
        return {
            "reads_MB": significant(need.read / 1e6, 3),
            "read_floor_ms": significant(reading * 1000, 3),
            "M_multiply_adds": significant(need.multiply_adds / 1e6, 3),
            "multiply_floor_ms": significant(multiplying * 1000, 3),
            "times_the_floor": significant(seconds / max(need.floor_seconds, 1e-12), 3),
        }

    def needs(self, tokens: int, sampled: int, seen: int) -> "dict[str, Need]":
        """What each piece that has a floor must do; the whole step's floor is the sum of theirs."""
        shape = self.geometry
        heads, kv, hidden = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim, shape.hidden_size
        matrices = {
            "qkv": (heads + 2 * kv) * hidden,
            "out": heads * hidden,
            "gate_up": 2 * shape.intermediate_size * hidden,
            "down": shape.intermediate_size * hidden,
        }
        peak = self.products_per_s[PRODUCTS_OF.get(self.kind, "float multiply-adds")]
        element, layers = BYTES_OF[self.kind], self.num_layers
        found = {name: self._need(layers * size * element, layers * tokens * size, peak) for name, size in matrices.items()}
        head = shape.vocab_size * hidden
        # Four-bit models keep bytes there. Without a sampled row it is not read.
        found["head"] = self._need(head * max(element, 1.0) if sampled else 0.0, sampled * head, peak)
        # Queries of a decoding row share keys with nobody; those of a prompt find them in a cache.
        read = 2 * kv * BYTES_OF[self.cache] * (seen if tokens == sampled else tokens)
        each = self.products_per_s[PRODUCTS_OF["bfloat16_dot"] if self.cache == "bfloat16" else "float multiply-adds"]
        found["attention"] = self._need(layers * read, layers * 2 * heads * seen, each)
        total = [sum(column) for column in zip(*map(astuple, found.values()), strict=True)]
        return {**found, "whole step": Need(*total)}

    def _need(self, read: float, multiply_adds: float, peak: float) -> "Need":
        multiplying = multiply_adds / peak
        return Need(read, multiply_adds, multiplying, max(read / self.bytes_per_s, multiplying))


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes to read, products to add up, seconds that the latter take at the peak, and seconds of whichever takes longer."""

    read: float
    multiply_adds: float
    multiply_seconds: float
    floor_seconds: float


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
