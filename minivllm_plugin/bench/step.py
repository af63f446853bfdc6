"""Where a step's time goes: in the kernels, and in Python around them. Also the memory that the process holds meanwhile.

The engine is the real one, thread and streams included. Only steps in which every request decodes are counted.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from minivllm_plugin.bench.clients import exact_length, fresh_salts, read_all
from minivllm_plugin.bench.machine import resident_memory
from minivllm_plugin.bench.report import Report, describe_engine, engine_title, percentile, significant
from minivllm_plugin.bench.step_clock import StepClock, StepTimes
from minivllm_plugin.bench.workload import LAST_TOKEN_ID, offline_workload, warm_up_prompt
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.errors import ConfigError, UnsupportedFeatureError
from minivllm_plugin.serving.llm import LLM
from minivllm_plugin.serving.loading import Loaded, load

__all__ = ["measure_steps"]

TIMED_CALLS = ("minivllm_decoder_run", "minivllm_argmax")
PARTS = {
    "whole step": "from its start to the start of the next one",
    "kernels": "inside the compiled library",
    "schedule": "who runs; blocks; prefix index",
    "inputs and sampling": "the runner without kernels: ids and tables in, tokens out",
    "postprocess": "tokens appended, ends found, blocks freed",
    "records": "what each request gained, for the streams",
    "publish": "outboxes, deadlines, snapshot, inbox; what readers take from this thread",
    "outside kernels": "whole step less kernels",
}


def measure_steps(
    config: EngineConfig, *, num_sequences: int = 32, output: int = 128, stream: bool = False, repeat: int = 3, seed: int = 0
) -> Report:
    """Decode the offline workload's prompts, ``output`` tokens each, all at once, and time the parts of every step.

    Args:
        stream: read every token on an event loop, as a server does; else wait for the ends, as a batch job does.

    Raises:
        UnsupportedFeatureError: the model does not run on the compiled kernels, so there is no call to time.
    """
    from minivllm_kernels.cpu.library import kernel_library
    from minivllm_kernels.dispatch import KernelUnavailableError

    try:
        library = kernel_library()
    except KernelUnavailableError as error:
        raise UnsupportedFeatureError(f"the parts of a step are timed on the compiled CPU kernels only: {error}") from error
    clock = StepClock()

    def load_timed(config: EngineConfig) -> tuple[LLMEngine, Loaded]:
        engine, loaded = load(config)
        clock.attach(engine)
        return engine, loaded

    with clock.timing_calls(library, TIMED_CALLS), LLM.from_loader(config, load_timed) as llm:
        if llm.kernels != "cpu":
            raise UnsupportedFeatureError(
                f"the parts of a step are timed on the compiled CPU kernels only, and {config.model!r} runs on {llm.kernels} here"
            )
        last = min(LAST_TOKEN_ID, llm.vocab_size - 1)
        prompts = offline_workload(max(num_sequences, 2), seed=seed, last_token_id=last).prompts[:num_sequences]
        llm.generate([list(warm_up_prompt())], exact_length(8), use_tqdm=False)
        for salt in fresh_salts(repeat):
            _decode(llm, prompts, output, salt, stream)
        title, engine, memory = engine_title(llm), describe_engine(llm), resident_memory()
    runs = [_parts(step, following) for step, following in pairwise(clock.steps) if _is_counted(step, following, num_sequences)]
    if not runs:
        raise ConfigError(
            f"no step decoded {num_sequences} requests at once: at most {config.max_num_sequences} run "
            f"(max_num_sequences), and the pool holds {llm.num_blocks * config.block_size} tokens; lower --n"
        )
    settings = {
        "engine": engine,
        "num_sequences": num_sequences,
        "output": output,
        "stream": stream,
        "repeat": repeat,
        "seed": seed,
    }
    facts = {"steps_counted": len(runs), **{f"memory_{name}_bytes": value for name, value in memory.items()}}
    return Report("step", title, settings, _summarise(runs), runs, facts)


def _decode(llm: LLM, prompts: Sequence[Sequence[int]], output: int, salt: str, stream: bool) -> None:
    if stream:
        read_all(llm, prompts, [output] * len(prompts), concurrency=len(prompts), salts=[salt] * len(prompts))
        return
    salted = [{"prompt_token_ids": list(prompt), "cache_salt": salt} for prompt in prompts]
    llm.generate(salted, exact_length(output), use_tqdm=False)


def _is_counted(step: StepTimes, following: StepTimes, num_sequences: int) -> bool:
    """All requests decode, guessed tokens or not, in this step and in the next one, so that no idle time lies between the two."""
    return all(one.num_sequences == num_sequences and not one.is_prefill for one in (step, following))


def _parts(step: StepTimes, following: StepTimes) -> dict[str, float]:
    """Milliseconds of every part."""
    whole = following.begin - step.begin
    seconds = {
        "whole step": whole,
        "kernels": step.kernels,
        "schedule": step.schedule,
        "inputs and sampling": step.run - step.kernels,
        "postprocess": step.postprocess,
        "records": step.end - step.begin - step.run - step.schedule - step.postprocess,
        "publish": following.begin - step.end,
        "outside kernels": whole - step.kernels,
    }
    return {part: round(1000 * seconds[part], 4) for part in PARTS}


def _summarise(runs: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    rows = []
    for part, meaning in PARTS.items():
        values = [run[part] for run in runs]
        median, ninety = percentile(values, 50), percentile(values, 90)
        rows.append(
            {
                "part": part,
                "median_ms": significant(median),
                "mean_ms": significant(sum(values) / len(values)),
                "p90_ms": significant(ninety),
                "what": meaning,
            }
        )
    return rows
