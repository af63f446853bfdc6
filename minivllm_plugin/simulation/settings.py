"""The engine that is simulated: its settings, its scheduler, and the one place where policies enter."""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from minivllm_plugin.config import SchedulingPolicy, check_integer
from minivllm_plugin.engine.hooks import Observer
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.simulation.trace import Trace

__all__ = ["DEFAULT_POOL_TOKENS", "Attached", "Settings", "attach_policies", "build_scheduler"]

DEFAULT_POOL_TOKENS = 2**20
NO_EOS = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """One replica. Names and defaults are EngineConfig's where both have the field.

    Attributes:
        num_blocks: KV blocks in the pool; None makes room for about a million tokens, ``"unlimited"`` for all the trace.
        block_size: tokens per block; None takes what the trace's hash ids stand for, else 16.
        policy: the engine's own order, ``fcfs`` or ``priority``.
        policies: scheduling policies by name, or plugin objects; the first that has an opinion decides.
        whole_blocks: every hash id stands for one whole block of the pool, whatever its size; one token of its own follows. So
            the cache can find all that equal ids promise; lengths of the trace are rounded up to blocks.
        max_queue_size: most requests that wait; one more is refused. None: any number.
    """

    num_blocks: int | str | None = None
    block_size: int | None = None
    max_num_sequences: int = 64
    max_num_batched_tokens: int = 512
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    policy: SchedulingPolicy = "fcfs"
    policies: tuple[Any, ...] = ()
    whole_blocks: bool = False
    max_queue_size: int | None = None

    def __post_init__(self) -> None:
        check_integer("max_num_sequences", self.max_num_sequences, at_least=1)
        check_integer("max_num_batched_tokens", self.max_num_batched_tokens, at_least=1)
        if self.block_size is not None:
            check_integer("block_size", self.block_size, at_least=1)
        if self.max_queue_size is not None:
            check_integer("max_queue_size", self.max_queue_size, at_least=0)
        if isinstance(self.num_blocks, str):
            if self.num_blocks != "unlimited":
                raise ConfigError(f"num_blocks must be an integer of at least 1 or 'unlimited', got {self.num_blocks!r}")
        elif self.num_blocks is not None:
            check_integer("num_blocks", self.num_blocks, at_least=1)

    def resolved_block_size(self, trace: Trace) -> int:
        return self.block_size or (trace.block_tokens if trace.has_hash_ids else 16)

    def resolved_num_blocks(self, trace: Trace) -> int:
        """The pool's size. Unlimited: every request could keep blocks of its own for ever, so nothing is ever evicted."""
        size = self.resolved_block_size(trace)
        if isinstance(self.num_blocks, int):
            return self.num_blocks
        if self.num_blocks is None:
            return max(1, DEFAULT_POOL_TOKENS // size)
        extra = 2 if self.whole_blocks else 1
        return sum(
            (len(one.hash_ids) if self.whole_blocks and one.hash_ids else -(-one.prompt_tokens // size))
            + one.output_tokens // size
            + extra
            for one in trace
        )


@dataclass(frozen=True, slots=True)
class Attached:
    """What came with the policies of one scheduler.

    Attributes:
        observer: somebody wants to be told of every step.
        before_queueing: asks whether a sequence may queue, and with which salt; raises RequestRejectedError.
        decisions: what policies are asked about, such as ``order_waiting``.
    """

    observer: Observer | None
    before_queueing: Callable[[Sequence], None] | None
    decisions: frozenset[str]


def build_scheduler(settings: Settings, trace: Trace) -> Scheduler:
    """The engine's own Scheduler and BlockManager, as ``serving.loading`` builds them."""
    return Scheduler(
        settings.max_num_sequences,
        settings.max_num_batched_tokens,
        settings.resolved_num_blocks(trace),
        settings.resolved_block_size(trace),
        NO_EOS,
        enable_chunked_prefill=settings.enable_chunked_prefill,
        enable_prefix_caching=settings.enable_prefix_caching,
        policy=settings.policy,
    )


def attach_policies(scheduler: Scheduler, policies: SequenceABC[Any], clock: Callable[[], float]) -> Attached:
    """The only place where policies meet a simulated scheduler.

    Installed plugins that were not named stay out, errors are raised, and nobody is called slow: the clock is not real.

    Raises:
        PluginError: no such policy, or it is none.
    """
    if not policies:
        return Attached(None, None, frozenset())
    from minivllm_plugin.config import EngineConfig
    from minivllm_plugin.extensions import Extensions
    from minivllm_plugin.plugins.discovery import GROUP
    from minivllm_plugin.plugins.manager import EnginePlugins

    uninvited = {point.name for point in entry_points(group=GROUP)} - {name for name in policies if isinstance(name, str)}
    config = EngineConfig(policies=tuple(policies), block_plugins=tuple(sorted(uninvited)), plugin_errors="raise")
    plugins = EnginePlugins(config, Extensions.builtin(), judges_speed=False)
    observer = plugins.attach(scheduler, clock)
    return Attached(observer if plugins.has_observers else None, plugins.before_queueing, plugins.decisions)
