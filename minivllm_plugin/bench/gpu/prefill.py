"""Part: eight prompts of 2,048 tokens in one step, held against the matrix rate of the card."""

from minivllm_plugin.bench.gpu.engines import driven, model_runner, model_to_measure
from minivllm_plugin.bench.gpu.floors import matrix_rate_of
from minivllm_plugin.bench.gpu.hand_driven import add_prompts, finish
from minivllm_plugin.bench.gpu.records import Given, Recorder
from minivllm_plugin.bench.gpu.timing import seconds_on
from minivllm_plugin.runner.model_runner import ModelRunner

__all__ = ["flops", "run"]


def run(given: Given, record: Recorder) -> None:
    """One figure: time beside the time of the products alone."""
    rate = matrix_rate_of(given)
    count, length = (2, 16) if given.rehearse else (8, 2048)
    options = {
        "dtype": "bfloat16",
        "max_num_sequences": count,
        "max_num_batched_tokens": count * length,
        "max_model_len": length + 16,
        "num_blocks": 2 * count * (length // 16 + 1),
        "enable_prefix_caching": False,
        "async_scheduling": False,
    }
    with model_to_measure(given) as model, driven(model, given, **options) as engine:
        number = 0

        def compute() -> None:
            nonlocal number
            number += 1
            finish(engine, add_prompts(engine, count, length, 1, seed=number))

        seconds = seconds_on("cpu", compute, repeats=2 if given.rehearse else 5)  # each ends with its tokens on the host
        work = flops(model_runner(engine), count, length)
    record.figure(f"prefill, {count} prompts of {length:,} tokens", seconds * 1e3, "ms", work / rate * 1e3, "floor")
    record.figure("the same, tokens a second", count * length / seconds, "tok/s")


def flops(runner: ModelRunner, count: int, length: int) -> float:
    """Multiplications and additions of ``count`` prompts: of every token with every matrix, of every query with the keys that it
    sees and their values, and of the last rows with the output layer."""
    module, config = runner.model.module, runner.model.config
    matrices = sum(parameter.numel() for layer in module.model.layers for parameter in layer.parameters() if parameter.dim() == 2)
    pairs = length * (length + 1) / 2
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * pairs
    head = 2 * config.hidden_size * config.vocab_size
    return float(count * (2 * matrices * length + attention + head))
