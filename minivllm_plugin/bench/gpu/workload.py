"""Part: nano-vllm's workload: 256 requests at once, 100 to 1,024 tokens in and as many out, drawn at temperature 0.6.

As its bench.py has it (github.com/GeeeekExplorer/nano-vllm), with prompts of our own seed. Qwen3-0.6B's shape, random weights.
"""

import random
import time
from collections.abc import Sequence

from minivllm_plugin.bench.gpu.engines import model_to_measure, opened, record_launches
from minivllm_plugin.bench.gpu.records import Given, Recorder
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.serving.llm import LLM

__all__ = ["GOAL", "GOAL_CARD", "run"]

GOAL, GOAL_CARD = 25_000, "H200"
SETTLING_SECONDS = 5.0

Work = Sequence[tuple[list[int], int]]


def run(given: Given, record: Recorder) -> None:
    """Output tokens a second, of the whole work load or of a part of it that fits the time."""
    began = time.perf_counter()
    options = {
        "dtype": "bfloat16",
        "max_model_len": 128 if given.rehearse else 4096,
        "max_num_sequences": 8 if given.rehearse else 256,
        "max_num_batched_tokens": 64 if given.rehearse else 16384,
        "cuda_graphs": "full",  # as nano-vllm does before it begins to count
        **({"num_blocks": 100} if given.rehearse else {}),
    }
    with model_to_measure(given) as model, opened(model, given, **options) as (llm, runner):
        last = min(10_000, llm.vocab_size - 2)
        work = _work(8, (5, 12), last, 0) if given.rehearse else _work(256, (100, 1024), last, 0)
        trial = _work(4, (2, 6), last, 1) if given.rehearse else _work(64, (32, 64), last, 1)
        _generate(llm, trial)  # compiles what is left to compile
        seconds, _ = _generate(llm, _other(trial))
        speed = sum(length for _, length in trial) / seconds
        left = given.seconds - (time.perf_counter() - began) - SETTLING_SECONDS
        is_whole = not given.quick and sum(length for _, length in work) / speed < left
        if not is_whole:
            record.note(
                "a part of the work load only: "
                + ("--quick" if given.quick else f"{speed:.0f} tok/s in a trial, {left:.0f} s left")
            )
            work = [(prompt[:256], min(length, 128)) for prompt, length in work]
        seconds, complete = _generate(llm, work)
        record.check("every request got all its tokens", complete)
        record_launches(runner, "work load", given, record, graphs=True)
        record.fact("KV blocks of the work load", llm.num_blocks)
        record.fact("preemptions of the work load", llm.snapshot().num_preemptions)
    num_in, num_out = sum(len(prompt) for prompt, _ in work), sum(length for _, length in work)
    goal = GOAL if is_whole and GOAL_CARD in str(given.known.get("device", "")) else None
    record.figure(
        f"{len(work)} requests, {num_in:,} tokens in, {num_out:,} out", num_out / seconds, "output tok/s", goal, "at least"
    )
    record.figure("the same, seconds", seconds, "s")


def _generate(llm: LLM, work: Work) -> tuple[float, bool]:
    """Seconds, and whether every request got as many tokens as it asked for."""
    params = [SamplingParams(temperature=0.6, max_tokens=length, ignore_eos=True) for _, length in work]
    began = time.perf_counter()
    outputs = llm.generate([prompt for prompt, _ in work], params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return seconds, [len(output.outputs[0].token_ids) for output in outputs] == [length for _, length in work]


def _work(count: int, lengths: tuple[int, int], last: int, seed: int) -> Work:
    rng = random.Random(seed)
    return [([rng.randint(5, last) for _ in range(rng.randint(*lengths))], rng.randint(*lengths)) for _ in range(count)]


def _other(work: Work) -> Work:
    """As long, and not in the prefix cache."""
    return [([token + 1 for token in prompt], length) for prompt, length in work]
