"""How many tokens per second: all prompts of the offline workload at once, and one long prompt's prefill."""

import time
from collections.abc import Sequence
from typing import Any

from minivllm_plugin.bench.clients import exact_length, fresh_salts
from minivllm_plugin.bench.report import Report, describe_engine, engine_title, median, significant
from minivllm_plugin.bench.workload import LAST_TOKEN_ID, Workload, offline_workload, prefill_prompt, warm_up_prompt
from minivllm_plugin.serving.llm import LLM

__all__ = ["measure_throughput"]

WARM_UP_TOKENS = 8


def measure_throughput(
    llm: LLM, *, sizes: Sequence[int] = (1, 8, 32), repeat: int = 3, prefill_tokens: int = 512, seed: int = 0
) -> Report:
    """Run the workload of each size ``repeat`` times, sizes in turn, after a warm-up of other tokens.

    No run finds anything in the prefix cache: each has a salt of its own.

    Args:
        sizes: numbers of prompts that are sent at once.
        prefill_tokens: length of the prompt whose prefill is timed; 0 leaves it out.
    """
    last = min(LAST_TOKEN_ID, llm.vocab_size - 1)
    work = {f"n={size}": offline_workload(size, seed=seed, last_token_id=last) for size in sizes}
    if prefill_tokens:
        work[f"prefill {prefill_tokens}"] = Workload((prefill_prompt(prefill_tokens, last_token_id=last),), (1,))
    llm.generate([list(warm_up_prompt())], exact_length(WARM_UP_TOKENS), use_tqdm=False)
    runs = [_run(llm, name, load) for _ in range(repeat) for name, load in work.items()]
    summary = [_summarise(name, [run for run in runs if run["case"] == name]) for name in work]
    settings = {"engine": describe_engine(llm), "sizes": list(sizes), "repeat": repeat, "seed": seed}
    return Report("throughput", engine_title(llm), settings, summary, runs)


def _run(llm: LLM, name: str, work: Workload) -> dict[str, Any]:
    """Send every prompt at once, wait for all, and count what came."""
    (salt,) = fresh_salts(1)
    prompts = [{"prompt_token_ids": list(prompt), "cache_salt": salt} for prompt in work.prompts]
    params = [exact_length(length) for length in work.output_lengths]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    return {
        "case": name,
        "seconds": seconds,
        "input_tokens": work.num_input_tokens,
        "output_tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
        "cached_tokens": sum(output.num_cached_tokens for output in outputs),
        "preemptions": sum(output.metrics.num_preemptions for output in outputs if output.metrics is not None),
    }


def _summarise(name: str, runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = median([run["seconds"] for run in runs])
    tokens_in, tokens_out = runs[0]["input_tokens"], runs[0]["output_tokens"]
    prefill = name.startswith("prefill")
    return {
        "case": name,
        "input_tokens": tokens_in,
        "output_tokens": tokens_out,
        "seconds": significant(seconds),
        "fastest_s": significant(min(run["seconds"] for run in runs)),
        "slowest_s": significant(max(run["seconds"] for run in runs)),
        "out_tok_per_s": None if prefill else significant(tokens_out / seconds),
        "total_tok_per_s": significant((tokens_in if prefill else tokens_in + tokens_out) / seconds),
    }
