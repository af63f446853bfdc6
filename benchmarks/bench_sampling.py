"""From logits to tokens: the most likely one, and drawn ones by kind of draw, beside the speed of memory.

    python benchmarks/bench_sampling.py smollm2-135m --rows 1 8 32

GB per second are of the logits read once, the least there is. Distributions: ``peaked`` has few likely tokens, as a trained
model's do; ``flat`` has most of the vocabulary, as random weights give. ``sample`` includes packing the draws and, on a GPU,
moving them; ``sample_rows`` finds them there, half of them greedy, as a captured graph does.
"""

from collections.abc import Callable, Sequence
from functools import partial

from op_table import OpTable, op_options
from op_timing import finish
from torch import Tensor

from minivllm_kernels import DrawTensors, TokenDraw, argmax, sample, sample_rows

SCALES = {"peaked": 3.0, "flat": 0.5}
DRAWS = {
    "temperature": TokenDraw(0.5, 0.6),
    "top_k, top_p": TokenDraw(0.5, 0.6, 40, 0.95),
    "top_p": TokenDraw(0.5, 1.0, 0, 0.95),
    "min_p": TokenDraw(0.5, 1.0, 0, 1.0, 0.05),
}
GREEDY = TokenDraw(0.0, 0.0)


def main(arguments: Sequence[str] | None = None) -> None:
    options = op_options(__doc__, arguments, rows=(1, 8, 32))
    table = OpTable.of(options)
    for count in options.rows:
        for distribution, scale in SCALES.items():
            logits = table.random(count, table.config.vocab_size).float() * scale
            _add(table, "argmax", f"{distribution}, greedy", logits, partial(argmax, logits))
            for kind, draw in DRAWS.items():
                name = f"{distribution}, {kind}"
                mixed = DrawTensors.build([GREEDY if row % 2 else draw for row in range(count)], options.device)
                _add(table, "sample", name, logits, partial(sample, logits, [draw] * count))
                _add(table, "sample_rows", f"{name}, half greedy", logits, partial(sample_rows, logits, mixed))
    finish("sampling", table.title, options, table.rows)


def _add(table: OpTable, op: str, draws: str, logits: Tensor, call: Callable[[], object]) -> None:
    table.add(op, logits.shape[0], call, logits.nbytes)
    table.rows[-1] = {"draws": draws, **table.rows[-1]}


if __name__ == "__main__":
    main()
