"""Measured steps for a cost model: the real engine, thread and streams included, on random prompts of many shapes.

Loads a model; everything else in this package does without. The clocks are put around the engine from outside.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from minivllm_plugin.bench.clients import exact_length, fresh_salts
from minivllm_plugin.bench.step_clock import StepClock
from minivllm_plugin.bench.workload import LAST_TOKEN_ID, offline_workload, prefill_prompt, warm_up_prompt
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.llm_engine import LLMEngine, RunnerAnswers
from minivllm_plugin.engine.sequence import Sequence as EngineSequence
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.serving.llm import LLM
from minivllm_plugin.serving.loading import Loaded, load
from minivllm_plugin.simulation.cost_model import CostModel, StepRecord, StepWork

__all__ = ["DEFAULT_SIZES", "StepRecorder", "measure_cost_model"]

DEFAULT_SIZES = (1, 2, 4, 6, 12, 24, 48)
PREFILL_LENGTHS = (64, 384, 1024)
WARM_UP_TOKENS = 8


class StepRecorder:
    """What every step of one engine computed, and how long it took until the next one began."""

    def __init__(self) -> None:
        self._clock = StepClock()
        self._work: dict[int, StepWork] = {}
        self._ends: set[int] = set()

    def load(self, config: EngineConfig) -> tuple[LLMEngine, Loaded]:
        """A loader for :meth:`LLM.from_loader`."""
        engine, loaded = load(config)
        self._clock.attach(engine)
        run: Callable[[list[EngineSequence], bool], RunnerAnswers] = engine.runner.run

        def recorded(seqs: list[EngineSequence], is_prefill: bool) -> RunnerAnswers:
            self._work[len(self._clock.steps) - 1] = StepWork.of(seqs)
            return run(seqs, is_prefill)

        name = "run"
        setattr(engine.runner, name, recorded)
        return engine, loaded

    def note_pause(self) -> None:
        """The latest step is followed by idle time, which is not its own."""
        self._ends.add(len(self._clock.steps) - 1)

    def records(self, *, since: int = 0) -> list[StepRecord]:
        """Steps from number ``since`` on, but the last of each busy time: nothing tells where it ended."""
        return list(self._records(since))

    @property
    def num_steps(self) -> int:
        return len(self._clock.steps)

    def _records(self, since: int) -> Iterator[StepRecord]:
        for number, (step, following) in enumerate(pairwise(self._clock.steps)):
            if number >= since and number in self._work and number not in self._ends:
                yield StepRecord(self._work[number], following.begin - step.begin)


def measure_cost_model(
    config: EngineConfig,
    *,
    sizes: Sequence[int] = DEFAULT_SIZES,
    output_tokens: int = 48,
    seed: int = 1,
) -> tuple[CostModel, list[StepRecord]]:
    """Run prompts of the offline workload, ``sizes`` of them at once, and some long ones alone, and fit.

    Args:
        output_tokens: of each prompt; cut to what the context window leaves.
        seed: of the prompts; the benchmarks use 0, so their prompts are others.

    Raises:
        ConfigError: a size below 1.
    """
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"sizes must be numbers of at least 1, got {list(sizes)}")
    recorder = StepRecorder()
    # A step with guesses computes rows that the simulator knows nothing of, and gains tokens that no cost model foretells.
    with LLM.from_loader(replace(config, num_speculative_tokens=0), recorder.load) as llm:
        last = min(LAST_TOKEN_ID, llm.vocab_size - 1)
        window = llm.max_model_len
        llm.generate([list(warm_up_prompt())[: window - 1]], exact_length(min(WARM_UP_TOKENS, window - 1)), use_tqdm=False)
        recorder.note_pause()
        first = recorder.num_steps
        loads: list[tuple[list[list[int]], int]] = []
        for size in sizes:
            prompts = offline_workload(max(size, 2), seed=seed, last_token_id=last).prompts[:size]
            loads.append(([list(prompt)[: max(1, window - output_tokens)] for prompt in prompts], output_tokens))
        for length in PREFILL_LENGTHS:
            loads.append(([list(prefill_prompt(min(length, window - 2), last_token_id=last))], 2))
        for salt, (token_lists, output) in zip(fresh_salts(len(loads)), loads, strict=True):
            salted = [{"prompt_token_ids": tokens, "cache_salt": salt} for tokens in token_lists]
            llm.generate(salted, exact_length(max(1, min(output, window - max(map(len, token_lists))))), use_tqdm=False)
            recorder.note_pause()
        title = f"{llm.model_name}, {llm.dtype} weights on {llm.kernels} kernels"
    records = recorder.records(since=first)
    return CostModel.fit(records, description=f"measured: {title}"), records
