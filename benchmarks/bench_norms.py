"""RMS norms: of rows (``rms_norm``), of sums that are kept (``add_rms_norm``), and those of a layer in the compiled step.

python benchmarks/bench_norms.py smollm2-135m --rows 1 32 512
"""

from collections.abc import Sequence

from op_table import OpTable, op_options
from op_timing import finish

from minivllm_kernels import add_rms_norm, rms_norm


def main(arguments: Sequence[str] | None = None) -> None:
    options = op_options(__doc__, arguments)
    table = OpTable.of(options)
    hidden, eps = table.config.hidden_size, table.config.rms_norm_eps
    weight = table.random(hidden)
    for count in options.rows:
        x, residual = table.random(count, hidden), table.random(count, hidden)
        size = x.numel() * x.element_size()
        table.add("rms_norm", count, lambda: rms_norm(x, weight, eps), 2 * size)  # noqa: B023  # called at once
        table.add("add_rms_norm", count, lambda: add_rms_norm(x, residual, weight, eps), 4 * size)  # noqa: B023
    table.add_compiled({"norms": "both norms of a layer, rounding included"})
    finish("norms", table.title, options, table.rows)


if __name__ == "__main__":
    main()
