"""The MLP's activation: ``silu_and_mul`` by itself, and what it adds to the product that the compiled step fuses it into.

python benchmarks/bench_silu_and_mul.py smollm2-135m --rows 1 32 512
"""

from collections.abc import Sequence

import torch
from bench_linear import SILU_MUL, STORE, copies_of, product
from op_table import OpTable, op_options
from op_timing import finish, seconds_of

from minivllm_kernels import silu_and_mul
from minivllm_kernels.cpu.packing import pack_matrix
from minivllm_kernels.dispatch import why_not

COPIES = 30


def main(arguments: Sequence[str] | None = None) -> None:
    options = op_options(__doc__, arguments)
    table = OpTable.of(options)
    inner = table.config.intermediate_size
    for count in options.rows:
        gate_up = table.random(count, 2 * inner)
        table.add("silu_and_mul", count, lambda: silu_and_mul(gate_up), gate_up.nbytes * 3 // 2)  # noqa: B023  # called at once
    if options.device == "cpu" and why_not("cpu", "cpu") is None:
        packed = pack_matrix(torch.randn(2 * inner, table.config.hidden_size) / table.config.hidden_size**0.5, "int8")
        copies = copies_of(packed, COPIES)
        for count in options.rows:
            x = torch.randn(count, table.config.hidden_size)
            for name, end in (("gate_up, int8", STORE), ("gate_up, int8, silu_and_mul fused", SILU_MUL)):
                seconds = seconds_of(product(copies, x, options.threads, end), options.seconds)
                table.add_measured(name, count, seconds)
    finish("silu-and-mul", table.title, options, table.rows)


if __name__ == "__main__":
    main()
