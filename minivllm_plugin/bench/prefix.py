"""What sharing a prefix saves: the same requests with nothing shared, with sharing from cold, and on a warm cache."""

import time
from collections.abc import Sequence
from typing import Any

from minivllm_plugin.bench.clients import exact_length, fresh_salts, read_all
from minivllm_plugin.bench.report import Report, describe_engine, engine_title, median, percentile, significant
from minivllm_plugin.bench.workload import LAST_TOKEN_ID, Workload, prefix_workload, warm_up_prompt
from minivllm_plugin.serving.llm import LLM

__all__ = ["measure_prefix"]

CASES = ("apart", "cold", "warm")


def measure_prefix(
    llm: LLM,
    *,
    num_requests: int = 32,
    shared: int = 1000,
    own: int = 32,
    output: int = 32,
    repeat: int = 3,
    seed: int = 0,
) -> Report:
    """Requests that begin with the same ``shared`` tokens, all sent at once, read token by token.

    ``apart``: each has a salt of its own, so nothing is shared. ``cold``: they share, and nothing is there when they arrive.
    ``warm``: one earlier request has computed the prefix.
    """
    last = min(LAST_TOKEN_ID, llm.vocab_size - 1)
    work = prefix_workload(num_requests, shared=shared, own=own, output=output, seed=seed, last_token_id=last)
    llm.generate([list(warm_up_prompt())], exact_length(8), use_tqdm=False)
    runs = [_run(llm, case, work, shared) for _ in range(repeat) for case in CASES]
    settings = {
        "engine": describe_engine(llm),
        "num_requests": num_requests,
        "shared": shared,
        "own": own,
        "output": output,
        "repeat": repeat,
        "seed": seed,
    }
    return Report("prefix", engine_title(llm), settings, _summarise(runs), runs)


def _run(llm: LLM, case: str, work: Workload, shared: int) -> dict[str, Any]:
    count = len(work.prompts)
    salts = fresh_salts(count) if case == "apart" else fresh_salts(1) * count
    if case == "warm":
        prefix = {"prompt_token_ids": list(work.prompts[0][:shared]), "cache_salt": salts[0]}
        llm.generate(prefix, exact_length(1), use_tqdm=False)
    started = time.perf_counter()
    readings = read_all(llm, work.prompts, work.output_lengths, concurrency=count, salts=salts)
    seconds = time.perf_counter() - started
    return {
        "case": case,
        "seconds": seconds,
        "input_tokens": work.num_input_tokens,
        "cached_tokens": sum(reading.num_cached_tokens for reading in readings),
        "output_tokens": sum(sum(reading.num_tokens) for reading in readings),
        "first_token_s": [reading.first_token_seconds for reading in readings],
    }


def _summarise(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    by_case = {case: [run for run in runs if run["case"] == case] for case in CASES}
    apart = median([run["seconds"] for run in by_case["apart"]])
    rows = []
    for case, own_runs in by_case.items():
        seconds = median([run["seconds"] for run in own_runs])
        first = [value for run in own_runs for value in run["first_token_s"]]
        rows.append(
            {
                "case": case,
                "seconds": significant(seconds),
                "times_as_fast": significant(apart / seconds, 3),
                "out_tok_per_s": significant(own_runs[0]["output_tokens"] / seconds),
                "cached_percent": significant(100 * own_runs[-1]["cached_tokens"] / own_runs[-1]["input_tokens"], 3),
                "first_p50_ms": significant(percentile(first, 50) * 1000),
                "first_max_ms": significant(max(first) * 1000),
            }
        )
    return rows
