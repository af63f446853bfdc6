"""Scripted engines in the situations in which hooks are called: what the hook benchmark times. No model, no torch.

Each scenario is the same work for every engine: plugins here answer what the engine would have done by itself.
"""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import entry_points
from typing import Any, NamedTuple

from minivllm_plugin.bench.unplugged import unplugged_engine
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence as EngineSequence
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.hookspecs import POLICY_HOOKS, hookimpl
from minivllm_plugin.plugins.discovery import BUILTIN, GROUP
from minivllm_plugin.plugins.manager import EnginePlugins
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.views import Admit, Budget

__all__ = ["SCENARIOS", "ConstantRunner", "Prepared", "Scenario", "plugins_for"]

BLOCK_SIZE = 16
TOKEN = 7
TOKENS_A_STEP = 512
NUM_WAITING = 64
NUM_REQUESTS = 256
FILL_BLOCKS = 16  # a prompt that fills the cache is so many blocks long
EVERYTHING = 1 << 20  # longer than any sequence here

# What the plugins of the benchmark do: nothing, or what the engine does by default.
IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "minivllm_request_queued": lambda self, request, state: None,
    "minivllm_request_finished": lambda self, request, outcome: None,
    "minivllm_step_started": lambda self, plan: None,
    "minivllm_step_finished": lambda self, report: None,
    "minivllm_blocks_changed": lambda self, events: None,
    "minivllm_admit": lambda self, request, state: Admit(),
    "minivllm_cache_salt": lambda self, request: "salt",
    "minivllm_step_budget": lambda self, state: Budget(num_tokens=state.max_num_batched_tokens),
    "minivllm_order_waiting": lambda self, waiting, state: [request.request_id for request in waiting],
    "minivllm_select_victims": lambda self, running, blocks_needed, state: [],
    "minivllm_order_eviction": lambda self, candidates, num_needed, state: [block.block_id for block in candidates],
}


class Prepared(NamedTuple):
    """An engine at the start of what is to be timed.

    Attributes:
        work: does it, once; returns how many units (steps, requests) it was.
        plugins: None for an engine without the seam.
    """

    work: Callable[[], int]
    plugins: EnginePlugins | None


class Scenario(NamedTuple):
    """A situation.

    Attributes:
        unit: what is counted: ``step`` or ``request``.
        hooks: those that are called in it.
        prepare: (plugin objects, or None for an engine without the seam; sequences; steps) -> what is timed.
    """

    name: str
    unit: str
    hooks: tuple[str, ...]
    prepare: Callable[[Sequence[object] | None, int, int], Prepared]


class ConstantRunner:
    """Answers every sequence with the same token, at once."""

    def run(self, seqs: list[EngineSequence], is_prefill: bool) -> list[int]:
        return [TOKEN] * len(seqs)


def plugins_for(hook: str, count: int) -> list[object]:
    """``count`` plugins that implement ``hook`` and nothing else."""
    implementation = hookimpl(IMPLEMENTATIONS[hook])
    return [type("BenchPlugin", (), {hook: implementation, "minivllm_name": f"bench-{index}"})() for index in range(count)]


def _engine(
    given: Sequence[object] | None, num_blocks: int, max_num_sequences: int
) -> tuple[LLMEngine, Scheduler, EnginePlugins | None]:
    scheduler_class, engine_class = (Scheduler, LLMEngine) if given is not None else unplugged_engine()
    scheduler = scheduler_class(max_num_sequences, TOKENS_A_STEP, num_blocks, BLOCK_SIZE, -1, enable_chunked_prefill=True)
    engine = engine_class(scheduler, ConstantRunner(), Limits(EVERYTHING, EVERYTHING))
    if given is None:
        return engine, scheduler, None
    policies = tuple(plugin for plugin in given if any(hasattr(plugin, hook) for hook in POLICY_HOOKS))
    config = EngineConfig(plugins=tuple(given), policies=policies, block_plugins=_others(), plugin_errors="raise")
    # On a busy machine, what is measured would be taken out for being slow.
    plugins = EnginePlugins(config, Extensions.builtin(), judges_speed=False)
    engine.attach(plugins)
    return engine, scheduler, plugins


@cache
def _others() -> tuple[str, ...]:
    """Plugins that this machine happens to have: they are not measured."""
    return (*(point.name for point in entry_points(group=GROUP)), *BUILTIN)


def _fill(engine: LLMEngine, num_sequences: int) -> None:
    """Sequences that decode for as long as there is room; of different lengths, so that their blocks fill one after another."""
    endless = SamplingParams(max_tokens=None, ignore_eos=True)
    for index in range(num_sequences):
        engine.add_prompt([index + 100] * (BLOCK_SIZE + index % BLOCK_SIZE), endless)
    while not all(seq.num_completion_tokens for seq in (*engine.scheduler.waiting, *engine.scheduler.running)):
        engine.step()


def _steps(engine: LLMEngine, num_steps: int, plugins: EnginePlugins | None) -> Prepared:
    def work() -> int:
        step = engine.step
        for _ in range(num_steps):
            step()
        return num_steps

    return Prepared(work, plugins)


def _room_for(num_sequences: int, num_steps: int) -> int:
    """Blocks that many sequences need for so many steps; a multiple of what fills the cache."""
    needed = num_sequences * ((num_steps + 64) // BLOCK_SIZE + 2)
    return -(-needed // FILL_BLOCKS) * FILL_BLOCKS


def _decode(given: Sequence[object] | None, num_sequences: int, num_steps: int) -> Prepared:
    engine, _, plugins = _engine(given, _room_for(num_sequences, num_steps), num_sequences)
    _fill(engine, num_sequences)
    return _steps(engine, num_steps, plugins)


def _with_waiting(given: Sequence[object] | None, num_sequences: int, num_steps: int) -> Prepared:
    """64 more wait, each for more blocks than will be free: they are put in order in every step, and none is admitted."""
    num_blocks = _room_for(num_sequences, num_steps)
    engine, _, plugins = _engine(given, num_blocks, 2 * num_sequences)
    _fill(engine, num_sequences)
    for index in range(NUM_WAITING):
        engine.add_prompt([index + 5000] * (num_blocks * BLOCK_SIZE - 1), SamplingParams(max_tokens=1))
    return _steps(engine, num_steps, plugins)


def _short_of_blocks(given: Sequence[object] | None, num_sequences: int, num_steps: int) -> Prepared:
    """Requests come and go in a pool of two blocks for each that could run; those that outgrow them put others out."""
    engine, _, plugins = _engine(given, 2 * num_sequences, num_sequences)
    params = SamplingParams(max_tokens=3 * BLOCK_SIZE, ignore_eos=True)
    for index in range(num_sequences + num_steps):  # more than can end
        engine.add_prompt([index + 100] * (BLOCK_SIZE + index % BLOCK_SIZE), params)
    for _ in range(2 * BLOCK_SIZE):
        engine.step()
    return _steps(engine, num_steps, plugins)


def _full_cache(given: Sequence[object] | None, num_sequences: int, num_steps: int) -> Prepared:
    """Every free block can be found, so that each one that is taken is evicted."""
    num_blocks = _room_for(num_sequences, num_steps)
    engine, _, plugins = _engine(given, num_blocks, num_sequences)
    once = SamplingParams(max_tokens=1)
    engine.generate([[index + 9000] * (FILL_BLOCKS * BLOCK_SIZE) for index in range(num_blocks // FILL_BLOCKS)], once)
    _fill(engine, num_sequences)
    return _steps(engine, num_steps, plugins)


def _requests(given: Sequence[object] | None, num_sequences: int, num_steps: int) -> Prepared:
    """256 requests of 16 tokens, each with one token of completion, from queueing to the end."""
    engine, _, plugins = _engine(given, 2 * NUM_REQUESTS, num_sequences)
    once = SamplingParams(max_tokens=1)
    prompts = [[index + 100] * BLOCK_SIZE for index in range(NUM_REQUESTS)]

    def work() -> int:
        engine.generate(prompts, once)
        return NUM_REQUESTS

    return Prepared(work, plugins)


SCENARIOS = (
    Scenario(
        "decode",
        "step",
        ("minivllm_step_started", "minivllm_step_finished", "minivllm_blocks_changed", "minivllm_step_budget"),
        _decode,
    ),
    Scenario(
        "requests",
        "request",
        ("minivllm_request_queued", "minivllm_request_finished", "minivllm_admit", "minivllm_cache_salt"),
        _requests,
    ),
    Scenario("64 waiting", "step", ("minivllm_order_waiting",), _with_waiting),
    Scenario("short of blocks", "step", ("minivllm_select_victims",), _short_of_blocks),
    Scenario("full cache", "step", ("minivllm_order_eviction",), _full_cache),
)
