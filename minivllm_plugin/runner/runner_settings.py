"""What a :class:`minivllm_plugin.runner.model_runner.ModelRunner` must know of its engine's settings, and no more."""

from dataclasses import dataclass

from minivllm_plugin.config import CudaGraphs, EngineConfig

__all__ = ["RunnerSettings"]


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """Bounds of the batches that will come.

    Attributes:
        max_num_sequences: most sequences of a batch; decode graphs go up to it.
        max_num_batched_tokens: most new tokens of a batch.
        max_model_len: most tokens of a sequence; None takes the model's own.
        kv_cache_dtype: ``auto`` is the weights', else one of :data:`minivllm_plugin.runner.kv_cache.CACHE_DTYPES`.
        cuda_graphs: ``lazy`` captures a size when it is first met, ``full`` all of them before the first batch, ``off`` none.
    """

    max_num_sequences: int = 64
    max_num_batched_tokens: int = 512
    max_model_len: int | None = None
    kv_cache_dtype: str = "auto"
    cuda_graphs: CudaGraphs = "lazy"

    @classmethod
    def of(cls, config: EngineConfig) -> "RunnerSettings":
        """The engine's."""
        return cls(
            config.max_num_sequences,
            config.max_num_batched_tokens,
            config.max_model_len,
            config.kv_cache_dtype,
            "off" if config.enforce_eager else config.cuda_graphs,
        )
