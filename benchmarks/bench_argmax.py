"""The greedy token: ``argmax`` over the logits of each row, beside the speed of memory.

python benchmarks/bench_argmax.py smollm2-135m --rows 1 8 32
"""

from collections.abc import Sequence

from op_table import OpTable, op_options
from op_timing import finish

from minivllm_kernels import argmax


def main(arguments: Sequence[str] | None = None) -> None:
    options = op_options(__doc__, arguments, rows=(1, 8, 32))
    table = OpTable.of(options)
    for count in options.rows:
        logits = table.random(count, table.config.vocab_size)
        table.add("argmax", count, lambda: argmax(logits), logits.nbytes)  # noqa: B023  # called at once
    finish("argmax", table.title, options, table.rows)


if __name__ == "__main__":
    main()
