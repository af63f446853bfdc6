"""An engine stepped by hand: prompts of random tokens, steps with a clock around them, and what a step must read."""

import random
import time

from minivllm_plugin.bench.gpu.timing import synchronise
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.runner.kv_cache import block_bytes
from minivllm_plugin.runner.model_runner import ModelRunner
from minivllm_plugin.sampling_parameters import SamplingParams

__all__ = ["add_prompts", "bytes_a_token", "finish", "timed_steps", "weight_bytes"]


def add_prompts(engine: LLMEngine, count: int, length: int, max_tokens: int, seed: int = 0) -> list[Sequence]:
    """Queue so many greedy requests, none of which begins as another does."""
    rng = random.Random(seed)
    last = min(10_000, engine.limits.vocab_size - 1)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [engine.add_prompt([rng.randint(5, last) for _ in range(length)], params) for _ in range(count)]


def timed_steps(engine: LLMEngine, count: int, device: str) -> float:
    """Seconds of ``count`` steps, from a device that has nothing to do until it has nothing to do again."""
    synchronise(device)
    began = time.perf_counter()
    for _ in range(count):
        engine.step()
    synchronise(device)
    return time.perf_counter() - began


def finish(engine: LLMEngine, seqs: list[Sequence]) -> None:
    """Step until all of them have ended."""
    while not all(seq.is_finished for seq in seqs):
        engine.step()


def weight_bytes(runner: ModelRunner) -> int:
    """Bytes of weights that a decode step reads: all but an embedding that is not the output layer as well."""
    module = runner.model.module
    total = sum(parameter.nbytes for parameter in module.parameters())  # each once, tied or not
    return total if module.lm_head is None else total - module.model.embed_tokens.weight.nbytes


def bytes_a_token(runner: ModelRunner) -> int:
    """Bytes of keys and values of one token, all layers."""
    return block_bytes(runner.model.cache_config, 1, runner.cache_kind)
