"""Part: how long a decode step takes beside the least that it can take, which is to read weights, keys and values once.

Batches of 1, 8, 64 and 256 requests at a context of 512, steps overlapped as an engine does by itself, with recorded graphs and
without; and the share of a step in which the device has nothing to do.
"""

from typing import Any

from minivllm_plugin.bench.gpu.engines import driven, model_runner, model_to_measure, record_launches
from minivllm_plugin.bench.gpu.floors import bandwidth_of
from minivllm_plugin.bench.gpu.hand_driven import add_prompts, bytes_a_token, finish, timed_steps, weight_bytes
from minivllm_plugin.bench.gpu.idle import idle_share
from minivllm_plugin.bench.gpu.records import Given, Recorder
from minivllm_plugin.engine.llm_engine import LLMEngine

__all__ = ["run"]

SIZES, CONTEXT, STEPS, SETTLING, PROFILED = (1, 8, 64, 256), 512, 48, 8, 8
SINGLE_MS, GOAL_CARD = 1.6, "H200"
SHARE = 0.6


def run(given: Given, record: Recorder) -> None:
    """Figures in milliseconds, each beside its floor."""
    bandwidth = bandwidth_of(given)
    sizes = (1, 4) if given.rehearse else SIZES
    context = 12 if given.rehearse else CONTEXT
    most = max(sizes)
    options: dict[str, Any] = {
        "dtype": "bfloat16",
        "max_num_sequences": most,
        "max_num_batched_tokens": 64 if given.rehearse else 16384,
        "max_model_len": 128 if given.rehearse else 2048,
        "num_blocks": most * -(-(context + SETTLING + STEPS + PROFILED + 32) // 16),
        "async_scheduling": True,
        "enable_prefix_caching": False,
    }
    with model_to_measure(given) as model:
        for graphs in (True, False):
            way = "graphs" if graphs else "eager"
            with driven(model, given, enforce_eager=not graphs, **options) as engine:
                for size in sizes:
                    _measure(engine, size, context, way, bandwidth, given, record)
                record_launches(model_runner(engine), f"decode, {way}", given, record, graphs=graphs)


def _measure(engine: LLMEngine, size: int, context: int, way: str, bandwidth: float, given: Given, record: Recorder) -> None:
    steps = 4 if given.rehearse else STEPS
    runner = model_runner(engine)
    seqs = add_prompts(engine, size, context, SETTLING + steps + PROFILED + 24, seed=size)
    while min(seq.num_completion_tokens for seq in seqs) < SETTLING:  # prompts, captures, first steps
        engine.step()
    seconds = timed_steps(engine, steps, given.device) / steps
    length = context + SETTLING + steps / 2
    floor = (weight_bytes(runner) + size * length * bytes_a_token(runner)) / bandwidth
    name = f"decode step, batch {size}, {way}"
    share = SHARE if way == "graphs" and size == max(SIZES) else 0
    record.figure(name, seconds * 1e3, "ms", floor * 1e3, "floor", share=share)
    if size == 1 and way == "graphs":
        goal = SINGLE_MS if GOAL_CARD in str(given.known.get("device", "")) else None
        record.figure("a token of one request", seconds * 1e3, "ms", goal, "at most")
    if size in (1, max(SIZES)):
        share_idle, reason = idle_share(engine.step, PROFILED, given.device)
        if share_idle is None:
            record.note(f"device idle, batch {size}, {way}: {reason}")
        else:
            record.fact(f"device idle, share of a step, batch {size}, {way}", round(share_idle, 3))
    finish(engine, seqs)
