"""Runners with and without recorded graphs over the same tiny model, and engines that drive them through everything that
changes a batch: joins, leaves, preemption, warm prefixes, prompts in pieces."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from cpu_models import build_module, model_config, write_checkpoint
from recorded_graphs import RecordingGraphApi
from tiny_models import load_directory

from minivllm_kernels import reference
from minivllm_kernels.dispatch import BackendTable
from minivllm_plugin import SamplingParams
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.models.loader import LoadedModel
from minivllm_plugin.runner.model_runner import ModelRunner
from minivllm_plugin.runner.runner_settings import RunnerSettings

__all__ = ["GREEDY", "PLAIN_TORCH", "Pool", "engine_of", "graph_runner", "make_prompts", "make_sequence", "serve", "tiny_model"]

PLAIN_TORCH = BackendTable({"reference": (reference, ("cpu",))})
GREEDY = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
VOCABULARY = 101


@dataclass(frozen=True)
class Pool:
    num_blocks: int = 64
    block_size: int = 4
    max_num_sequences: int = 6
    max_num_batched_tokens: int = 24


def tiny_model(family: str, directory: Path, **fields: Any) -> LoadedModel:
    config = model_config(family, hidden_size=32, intermediate_size=48, num_attention_heads=6, head_dim=8, **fields)
    return load_directory(write_checkpoint(build_module(config), directory), dtype="float32")


def graph_runner(
    model: LoadedModel, pool: Pool, api: RecordingGraphApi | None, backends: BackendTable = PLAIN_TORCH, **settings: Any
) -> ModelRunner:
    """With a poisoned cache: a slot that is read before it was written makes NaN of whatever it touches."""
    bounds = {"max_num_sequences": pool.max_num_sequences, "max_num_batched_tokens": pool.max_num_batched_tokens}
    runner = ModelRunner(model, (), backends, settings=RunnerSettings(**{**bounds, **settings}), graph_api=api)
    for pair in runner.allocate_kv_cache(pool.num_blocks, pool.block_size).layers:
        for tensor in pair:
            tensor.fill_(torch.nan)
    return runner


def engine_of(runner: ModelRunner, pool: Pool, *, asynchronous: bool = False, **options: Any) -> LLMEngine:
    scheduler = Scheduler(
        pool.max_num_sequences,
        pool.max_num_batched_tokens,
        pool.num_blocks,
        pool.block_size,
        -1,
        **{"enable_chunked_prefill": True, **options},
    )
    return LLMEngine(scheduler, runner, Limits(VOCABULARY, pool.num_blocks * pool.block_size), asynchronous=asynchronous)


def make_prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Of many lengths, some with the same beginning, some of a single token, some longer than a step may compute."""
    rng = random.Random(seed)
    shared = [rng.randrange(3, VOCABULARY) for _ in range(13)]
    lengths = [1, 30, 2, 17, 5, 9]
    return [
        shared[: rng.choice((0, 8, 13))] + [rng.randrange(3, VOCABULARY) for _ in range(lengths[i % len(lengths)])]
        for i in range(count)
    ]


def serve(
    engine: LLMEngine, prompts: list[list[int]], params: list[SamplingParams] | SamplingParams = GREEDY, *, every: int = 2
) -> list[list[int]]:
    """Completions of prompts of which one more arrives every so many steps; the queues' invariants hold all along."""
    wanted = params if isinstance(params, list) else [params] * len(prompts)
    sequences: list[Sequence] = []
    step = 0
    while len(sequences) < len(prompts) or not all(seq.is_finished for seq in sequences):
        if step % every == 0 and len(sequences) < len(prompts):
            sequences.append(engine.add_prompt(prompts[len(sequences)], wanted[len(sequences)]))
        engine.step()
        engine.scheduler.check_integrity()
        step += 1
    return [seq.completion_token_ids for seq in sequences]


def make_sequence(prompt: list[int], table: list[int], params: SamplingParams = GREEDY) -> Sequence:
    """One that stands before its prompt, with blocks of its own, for whoever calls a runner without a scheduler."""
    seq = Sequence(prompt, sampling_params=params)
    seq.block_table = table
    seq.num_scheduled_tokens = len(prompt)
    return seq
