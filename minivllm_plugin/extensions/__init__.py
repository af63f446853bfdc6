"""What plugins add to an engine: one registry a kind, all of them together in :class:`Extensions`.

One per engine, filled before it is loaded and passed on explicitly; nothing here is global. Importing it loads no torch.
"""

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from minivllm_plugin.extensions.adapters import AdapterRegistry
from minivllm_plugin.extensions.attention import AttentionBackendRegistry
from minivllm_plugin.extensions.extra_args import check_extra_args
from minivllm_plugin.extensions.logits import LogitsProcessorRegistry
from minivllm_plugin.extensions.metrics import MetricRegistry
from minivllm_plugin.extensions.models import ModelRegistry
from minivllm_plugin.extensions.parsers import ParserRegistry
from minivllm_plugin.extensions.stopping import StopCriterionRegistry, StopPipeline
from minivllm_plugin.extensions.weights import WeightLoaderRegistry
from minivllm_plugin.sampling_parameters import SamplingParams

if TYPE_CHECKING:
    from minivllm_plugin.engine.llm_engine import LLMEngine
    from minivllm_plugin.serving.tokenizer import Tokenizer

__all__ = ["Extensions"]


@dataclass(frozen=True, slots=True)
class Extensions:
    """The registries of one engine, each the argument of the hook ``minivllm_register_…`` of its kind."""

    models: ModelRegistry = field(default_factory=ModelRegistry.builtin)
    attention: AttentionBackendRegistry = field(default_factory=AttentionBackendRegistry)
    weights: WeightLoaderRegistry = field(default_factory=WeightLoaderRegistry)
    logits: LogitsProcessorRegistry = field(default_factory=LogitsProcessorRegistry.builtin)
    stopping: StopCriterionRegistry = field(default_factory=StopCriterionRegistry)
    parsers: ParserRegistry = field(default_factory=ParserRegistry.builtin)
    metrics: MetricRegistry = field(default_factory=MetricRegistry)
    adapters: AdapterRegistry = field(default_factory=AdapterRegistry)

    def __post_init__(self) -> None:
        self.logits.sibling, self.stopping.sibling = self.stopping, self.logits  # both are named in extra_args

    @classmethod
    def builtin(cls) -> "Extensions":
        """What an engine has without plugins."""
        return cls()

    def attach(self, engine: "LLMEngine", tokenizer: "Tokenizer | None") -> None:
        """Have ``engine`` use the logits processors and stop criteria that are there now. Once, before its first request.

        A runner takes processors by an attribute ``processors``. One without it (a scripted one has no logits) refuses requests
        that ask for them.
        """
        names = set(self.stopping.names())
        if len(self.stopping):
            engine.scheduler.stop_check = StopPipeline(self.stopping, tokenizer.decode if tokenizer is not None else None)
        if len(self.logits) and hasattr(engine.runner, "processors"):
            from minivllm_plugin.extensions.logits_pipeline import LogitsPipeline  # imports torch, which the runner has by now

            engine.runner.processors = LogitsPipeline(self.logits)
            names.update(self.logits.names())
        engine.extra_arg_names = frozenset(names)

    def check_extra_args(self, params: SamplingParams) -> None:
        """Raise unless this engine knows every name in ``params.extra_args`` and takes its value. On the caller's thread.

        Raises:
            InvalidRequestError: naming what is unknown, or the plugin that refuses.
        """
        if params.extra_args:
            check_extra_args(params, self.logits, self.stopping)

    def discard_owner(self, owner: str) -> tuple[str, ...]:
        """Take out everything that plugin ``owner`` added to any of the registries, and return its names."""
        return tuple(name for each in fields(self) for name in getattr(self, each.name).discard_owner(owner))
