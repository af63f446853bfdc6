"""What a rank is told before it starts, and how it loads its part of the model from that."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.models.catalog import ModelSource
from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.parallel.context import Group, ParallelContext

if TYPE_CHECKING:
    from minivllm_plugin.runner.model_runner import ModelRunner

__all__ = ["RankPlan"]


@dataclass(frozen=True, slots=True)
class RankPlan:
    """One rank of one engine. Goes to another process, so it holds plain records only.

    Attributes:
        parent: process id of rank 0.
        devices: of all ranks, in order.
        backend: ``gloo`` or ``nccl``.
        rendezvous: where the ranks find each other; see :class:`minivllm_plugin.parallel.groups.ProcessGroup`.
        engine: the settings, without plugins.
        home: directory with the safetensors; None for dummy weights.
    """

    rank: int
    parent: int
    devices: tuple[str, ...]
    backend: str
    rendezvous: Path
    engine: EngineConfig
    source: ModelSource
    model: ModelConfig
    home: Path | None

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def device(self) -> str:
        return self.devices[self.rank]

    def of_rank(self, rank: int) -> "RankPlan":
        """The same engine's plan for another rank."""
        return replace(self, rank=rank)

    def load(self, group: Group, end_token_ids: Collection[int] = ()) -> "ModelRunner":
        """This rank's part of the model, ready to have its pool allocated.

        Raises:
            ConfigError, ModelError: as :func:`minivllm_plugin.models.loader.load_model`.
        """
        from minivllm_plugin.extensions import Extensions
        from minivllm_plugin.models.foreign import WeightsOf
        from minivllm_plugin.models.loader import ModelDescription, load_model
        from minivllm_plugin.runner.model_runner import ModelRunner
        from minivllm_plugin.runner.runner_settings import RunnerSettings

        weights = None if self.home is None else WeightsOf(self.home, Extensions.builtin().weights)
        model = load_model(
            self.source,
            dtype=self.engine.dtype,
            device=self.device,
            load_format=self.engine.load_format,
            seed=self.engine.seed,
            max_positions=self.engine.max_model_len,
            description=ModelDescription(self.model, self.home, {}, weights),
            parallel=ParallelContext(self.rank, self.size, group),
        )
        return ModelRunner(model, end_token_ids, settings=RunnerSettings.of(self.engine))
