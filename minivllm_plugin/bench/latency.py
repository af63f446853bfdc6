"""What one reader waits for: the first token, and every next one, among others and while a long prompt arrives."""

import asyncio
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from minivllm_plugin.bench.clients import Reading, exact_length, fresh_salts, read_all, read_one
from minivllm_plugin.bench.report import Report, describe_engine, engine_title, percentile, significant
from minivllm_plugin.bench.workload import LAST_TOKEN_ID, offline_workload, prefill_prompt, warm_up_prompt
from minivllm_plugin.serving.llm import LLM

__all__ = ["measure_latency"]

PERCENTILES = (50, 90, 99)
TOKENS_BEFORE_INTRUSION = 8  # every decoder has got so many when the long prompt arrives
INTRUDER_OUTPUT = 4
INTRUDED_OUTPUT = 96


def measure_latency(
    llm: LLM, *, concurrency: int = 8, num_requests: int = 32, long_prompt: int = 1024, repeat: int = 3, seed: int = 0
) -> Report:
    """Percentiles of the time to the first token and between tokens.

    Two cases: ``steady``, where ``num_requests`` of the offline workload come from ``concurrency`` clients, each sending its
    next request when the last has ended; and ``long prompt``, where ``concurrency`` requests decode and one prompt of
    ``long_prompt`` tokens arrives. Its own first token is the row ``long prompt: itself``. Nothing is cached.

    Args:
        repeat: how often a long prompt arrives.
    """
    last = min(LAST_TOKEN_ID, llm.vocab_size - 1)
    work = offline_workload(max(num_requests, 2), seed=seed, last_token_id=last)
    llm.generate([list(warm_up_prompt())], exact_length(8), use_tqdm=False)
    prompts, lengths = work.prompts[:num_requests], work.output_lengths[:num_requests]
    steady = read_all(llm, prompts, lengths, concurrency=concurrency, salts=fresh_salts(num_requests))
    decoders: list[Reading] = []
    intruders: list[Reading] = []
    gaps: list[float] = []
    for _ in range(repeat):
        among, intruder = _intrude(llm, concurrency, long_prompt, last)
        decoders += among
        intruders.append(intruder)
        gaps += _gaps_during(among, intruder)
    summary = [
        _row("steady", steady, chain.from_iterable(reading.gaps for reading in steady)),
        _row("long prompt: decoders", decoders, gaps),
        _row("long prompt: itself", intruders, ()),
    ]
    settings = {
        "engine": describe_engine(llm),
        "concurrency": concurrency,
        "num_requests": num_requests,
        "long_prompt": long_prompt,
        "repeat": repeat,
        "seed": seed,
    }
    cases = (("steady", steady), ("long prompt: decoders", decoders), ("long prompt: itself", intruders))
    runs = [_run(case, reading) for case, readings in cases for reading in readings]
    return Report("latency", engine_title(llm), settings, summary, runs)


def _intrude(llm: LLM, concurrency: int, long_prompt: int, last: int) -> tuple[list[Reading], Reading]:
    """Readings of the requests that were decoding, and of the long prompt that came among them."""

    async def run() -> tuple[list[Reading], Reading]:
        progress: list[list[int]] = [[] for _ in range(concurrency)]
        prompts = [tuple((token + index) % last + 1 for token in warm_up_prompt()) for index in range(concurrency)]
        *salts, own_salt = fresh_salts(concurrency + 1)
        decoding = [
            asyncio.create_task(read_one(llm, prompt, INTRUDED_OUTPUT, salt=salt, progress=counts))
            for prompt, salt, counts in zip(prompts, salts, progress, strict=True)
        ]
        while any(sum(counts) < TOKENS_BEFORE_INTRUSION for counts in progress) and not any(task.done() for task in decoding):
            await asyncio.sleep(0.001)
        intruder = await read_one(llm, prefill_prompt(long_prompt, last_token_id=last), INTRUDER_OUTPUT, salt=own_salt)
        return list(await asyncio.gather(*decoding)), intruder

    return asyncio.run(run())


def _gaps_during(decoders: Sequence[Reading], intruder: Reading) -> list[float]:
    """Gaps that overlap the time between the long prompt's arrival and its first token."""
    begin, end = intruder.submitted, intruder.arrivals[0]
    return [
        later - earlier
        for reading in decoders
        for earlier, later in zip(reading.arrivals, reading.arrivals[1:], strict=False)
        if later > begin and earlier < end
    ]


def _row(case: str, readings: Sequence[Reading], gaps: Iterable[float]) -> dict[str, Any]:
    first = [reading.first_token_seconds * 1000 for reading in readings]
    between = [gap * 1000 for gap in gaps]
    row: dict[str, Any] = {"case": case, "requests": len(readings)}
    for name, values in (("first", first), ("between", between)):
        for percent in PERCENTILES:
            row[f"{name}_p{percent}_ms"] = significant(percentile(values, percent)) if values else None
        row[f"{name}_max_ms"] = significant(max(values)) if values else None
    return row


def _run(case: str, reading: Reading) -> dict[str, Any]:
    return {
        "case": case,
        "prompt_tokens": reading.num_prompt_tokens,
        "output_tokens": sum(reading.num_tokens),
        "cached_tokens": reading.num_cached_tokens,
        "first_token_s": reading.first_token_seconds,
        "gaps_s": reading.gaps,
    }
