"""The matrix product of the CPU kernels: every matrix of a model, by kind of weights and number of rows.

    python benchmarks/bench_linear.py smollm2-135m --kind int8 --rows 1 --rows 32

Each call takes the next of ``--copies`` equal-sized matrices, so that weights come from memory as they do in a model. The time
includes turning float activations into what the kind wants, on one thread; in a step all threads do that.
"""

import argparse
import ctypes
import itertools
from collections.abc import Callable, Sequence

import torch
from op_timing import finish, parser, seconds_of

from minivllm_kernels.cpu.library import kernel_library
from minivllm_kernels.cpu.packing import KINDS, PackedMatrix, pack_matrix
from minivllm_plugin.bench.report import significant
from minivllm_plugin.models.catalog import resolve
from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.models.loader import describe_model

STORE, SILU_MUL = 0, 2  # epilogues: write; write silu of one half times the other. As in matrix.h


def main(arguments: Sequence[str] | None = None) -> None:
    options = _parse(arguments)
    config = describe_model(resolve(options.model), load_format="dummy").config
    rows = []
    for (name, channels, depth), kind in itertools.product(_matrices(config), options.kind):
        weight = torch.randn(channels, depth, generator=torch.Generator().manual_seed(0)) / depth**0.5
        packed = pack_matrix(weight, kind)
        copies = copies_of(packed, options.copies)
        for count in options.rows:
            seconds = seconds_of(product(copies, torch.randn(count, depth), options.threads), options.seconds)
            rows.append(
                {
                    "matrix": name,
                    "channels": channels,
                    "depth": depth,
                    "kind": kind,
                    "rows": count,
                    "microseconds": significant(seconds * 1e6, 3),
                    "weights_GB_per_s": significant(packed.data.nbytes / seconds / 1e9, 3),
                    "G_multiply_adds_per_s": significant(count * channels * depth / seconds / 1e9, 3),
                }
            )
    finish("linear", f"matrices of {options.model}, {kernel_library().minivllm_isa().decode()}", options, rows)


def copies_of(packed: PackedMatrix, count: int) -> list[PackedMatrix]:
    """As many matrices of the same values, each in memory of its own."""
    return [PackedMatrix(packed.kind, packed.data.clone(), packed.scale, None) for _ in range(count)]


def product(copies: Sequence[PackedMatrix], x: torch.Tensor, threads: int, epilogue: int = STORE) -> Callable[[], None]:
    """A call that multiplies ``x`` with the next of the copies each time. The caller keeps them alive."""
    library = kernel_library()
    out = torch.empty(x.shape[0], copies[0].channels)
    turns = itertools.cycle([copy.struct() for copy in copies])

    def call() -> None:
        struct = ctypes.byref(next(turns))
        library.minivllm_linear(struct, x.data_ptr(), x.shape[0], x.shape[1], out.data_ptr(), epilogue, threads)

    return call


def _matrices(config: ModelConfig) -> list[tuple[str, int, int]]:
    """Name, output channels, depth."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return [
        ("qkv", heads + 2 * kv, config.hidden_size),
        ("out", config.hidden_size, heads),
        ("gate_up", 2 * config.intermediate_size, config.hidden_size),
        ("down", config.hidden_size, config.intermediate_size),
        ("head", config.vocab_size, config.hidden_size),
    ]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("model", nargs="?", default="smollm2-135m", help="whose shapes are taken")
    made.add_argument("--kind", action="append", choices=tuple(KINDS), help="of weights; may be repeated; default: all")
    made.add_argument("--rows", action="append", type=int, help="may be repeated; default 1, 8, 32, 64, 256")
    made.add_argument("--copies", type=int, default=30, help="of each matrix, taken in turn")
    options = made.parse_args(arguments)
    options.kind, options.rows = options.kind or list(KINDS), options.rows or [1, 8, 32, 64, 256]
    return options


if __name__ == "__main__":
    main()
