"""What the benchmarks of single ops share: shapes of a model, the op as the dispatcher has it, and the compiled step's own.

An op of the public list is timed as ``minivllm_kernels`` runs it on ``--device``, on the backend that was chosen there. On a CPU
a whole step is one call of the compiled library instead, which has its own version of the op: that one is timed inside steps of
as many rows, and its row says ``compiled step``.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from bench_decoder import BLOCK_SIZE, open_decoder, step_pieces
from op_timing import parser, seconds_of

from minivllm_kernels.cpu.decoder import CpuDecoder
from minivllm_kernels.dispatch import choose, why_not
from minivllm_plugin.bench.report import significant
from minivllm_plugin.models.catalog import resolve
from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.models.loader import describe_model

__all__ = ["COMPILED", "OpTable", "op_options"]

COMPILED = "compiled step"
ROWS = (1, 8, 32, 512)


@dataclass(frozen=True, slots=True)
class OpTable:
    """Rows of one benchmark, all of one model's shape on one device."""

    options: argparse.Namespace
    config: ModelConfig
    rows: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, options: argparse.Namespace) -> "OpTable":
        return cls(options, describe_model(resolve(options.model), load_format="dummy").config)

    @property
    def title(self) -> str:
        return f"shapes of {self.options.model} on {self.options.device}"

    def random(self, *shape: int) -> torch.Tensor:
        """Normal values in ``--dtype`` on the device."""
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return values.to(self.options.device, getattr(torch, self.options.dtype))

    def add(self, op: str, count: int, call: Callable[[], object], moved: int) -> None:
        """Time an op of the public list. ``moved``: bytes that it must read and write."""
        device = torch.device(self.options.device)

        def synchronised() -> None:
            call()
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        backend = choose(op, device.type).backend
        self._append(op, backend, count, seconds_of(synchronised, self.options.seconds), moved)

    def add_compiled(self, ops: Mapping[str, str]) -> None:
        """Time pieces of compiled steps of each number of rows (piece -> what it is called here): one layer's share."""
        if self.options.device != "cpu" or why_not("cpu", "cpu") is not None:
            return
        most = max(self.options.rows)
        decoder = open_decoder(
            self.options.model, "int8", "bfloat16", num_blocks=most, longest=BLOCK_SIZE, threads=self.options.threads
        )
        for count in self.options.rows:
            tables = [[index] for index in range(count)]
            step = step_pieces(decoder, _one_token_each(decoder, tables), self.options.seconds)
            for piece, name in ops.items():
                self.add_measured(name, count, step[piece] / self.config.num_layers)

    def add_measured(self, op: str, count: int, seconds: float) -> None:
        """A row of the compiled library's own."""
        self._append(op, COMPILED, count, seconds, None)

    def _append(self, op: str, backend: str, count: int, seconds: float, moved: int | None) -> None:
        self.rows.append(
            {
                "op": op,
                "backend": backend,
                "rows": count,
                "microseconds": significant(seconds * 1e6, 3),
                "GB_per_s": None if moved is None else significant(moved / seconds / 1e9, 3),
            }
        )


def _one_token_each(decoder: CpuDecoder, tables: Sequence[Sequence[int]]) -> Callable[[], object]:
    ones = [1] * len(tables)
    return lambda: decoder.forward([7] * len(tables), ones, ones, tables, [])


def op_options(text: str | None, arguments: Sequence[str] | None, *, rows: Sequence[int] = ROWS) -> argparse.Namespace:
    """The options of all of them, parsed; ``rows`` by default."""
    made = parser(text)
    made.add_argument("model", nargs="?", default="smollm2-135m", help="whose shapes are taken")
    made.add_argument("--rows", action="extend", nargs="+", type=int, help=f"of activations; default {rows}")
    made.add_argument("--device", default="cpu")
    made.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    options = made.parse_args(arguments)
    options.rows = options.rows or list(rows)
    return options
