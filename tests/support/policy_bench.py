"""What the tests of scheduling policies share: records made by hand, and the real engine on a clock that only steps move."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence as EngineSequence
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.plugins.manager import EnginePlugins
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import LedgerRunner, assert_invariants
from minivllm_plugin.views import CandidateBlock, EngineState, RequestView

STEP_SECONDS = 1.0


REQUEST = RequestView("", 0, 0.0, 0, 10, 0, 0, 0, 10, 0, 0, -1)
IDLE = EngineState(1, 0.0, 1, 0, 100, 100, 0, 4, 64, 512, 0)


def view(request_id: str, arrival: int = 0, **fields: Any) -> RequestView:
    """A waiting request of 10 prompt tokens that wants 10 more; ``tenant`` is put into its metadata."""
    if "tenant" in fields:
        fields["metadata"] = {"tenant": fields.pop("tenant")}
    fields.setdefault("arrival_time", float(arrival))
    return REQUEST._replace(request_id=request_id, arrival=arrival, **fields)


def state(now: float = 0.0, **fields: Any) -> EngineState:
    """An idle engine with 64 places, a pool of 100 blocks and one waiting request."""
    return IDLE._replace(now=now, **fields)


def block(block_id: int, num_hits: int, age: int = 0, depth: int = 0) -> CandidateBlock:
    return CandidateBlock(block_id, num_hits, age, depth)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class TimedRunner:
    """A ledger whose every step takes :data:`STEP_SECONDS` of the virtual clock."""

    ledger: LedgerRunner
    clock: Clock

    def run(self, seqs: list[EngineSequence], is_prefill: bool) -> list[int]:
        self.clock.now += STEP_SECONDS
        return self.ledger.run(seqs, is_prefill)


@dataclass
class Bench:
    """The real LLMEngine over a ledger, with policies attached and everything checked after each step."""

    policies: Sequence[Any]
    scheduler: Scheduler
    vocab_size: int = 1000
    choose: Callable[[EngineSequence], int] | None = None
    sequences: list[EngineSequence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = Clock()
        self.ledger = LedgerRunner.for_scheduler(self.scheduler, vocab_size=self.vocab_size, choose=self.choose)
        window = self.scheduler.block_manager.num_blocks * self.scheduler.block_size
        limits = Limits(self.vocab_size, window)
        self.engine = LLMEngine(self.scheduler, TimedRunner(self.ledger, self.clock), limits, clock=self.clock)
        if self.policies:
            config = EngineConfig(policies=tuple(self.policies), plugin_errors="raise")
            self.engine.attach(EnginePlugins(config, Extensions.builtin()))

    def add(self, prompt: Sequence[int], max_tokens: int = 4, *, ignore_eos: bool = True, **fields: Any) -> EngineSequence:
        if "tenant" in fields:
            fields["metadata"] = {"tenant": fields.pop("tenant")}
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=ignore_eos)
        seq = self.engine.add_prompt(list(prompt), params, **fields)
        self.sequences.append(seq)
        return seq

    def step(self) -> list[str]:
        """One step; ids in the batch."""
        output = self.engine.step()
        assert_invariants(self.scheduler, self.sequences)
        return [seq.request_id or "" for seq in output.batch]

    def run(self, most_steps: int = 2000) -> None:
        """To the end."""
        for _ in range(most_steps):
            if self.scheduler.is_finished():
                return
            self.step()
        raise AssertionError(f"unfinished after {most_steps} steps: {self.scheduler.waiting} {self.scheduler.running}")

    @property
    def num_computed(self) -> int:
        """Tokens that all steps so far computed."""
        return sum(batch.num_tokens for batch in self.ledger.batches)


def mixed(
    num_blocks: int, block_size: int = 4, *, max_num_sequences: int = 8, budget: int = 64, eos: int = 0, **options: Any
) -> Scheduler:
    """A scheduler with mixed batches, as the engine has it."""
    options.setdefault("enable_chunked_prefill", True)
    return Scheduler(max_num_sequences, budget, num_blocks, block_size, eos, **options)
