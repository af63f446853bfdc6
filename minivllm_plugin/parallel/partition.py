"""Which numbers of ranks a model can be shared out over, and what each rank then holds. Arithmetic only: no torch.

Heads and MLP columns are shared out evenly. A KV head that there is once for several ranks is held by each of them, so that
every query head finds its own where it is; any other split would make some ranks wait for others, and is refused by name.
"""

from collections.abc import Callable
from dataclasses import replace

from minivllm_plugin.errors import ConfigError
from minivllm_plugin.models.config import ModelConfig

__all__ = ["check_partition", "kv_head_share", "partition_sizes", "rank_config"]

LARGEST_NAMED = 64


def check_partition(config: ModelConfig, size: int) -> None:
    """Raise unless ``size`` ranks can share this model.

    Raises:
        ConfigError: naming what does not divide, and the sizes that would do.
    """
    misfit = _misfit(config, size)
    if misfit is not None:
        works = ", ".join(map(str, partition_sizes(config)))
        raise ConfigError(f"tensor_parallel_size={size} does not go with this model: {misfit}; sizes that work are {works}")


def partition_sizes(config: ModelConfig) -> list[int]:
    """Every number of ranks, up to 64, that can share this model."""
    return [size for size in range(1, LARGEST_NAMED + 1) if _misfit(config, size) is None]


def kv_head_share(num_kv_heads: int, rank: int, size: int) -> tuple[int, int]:
    """First KV head that ``rank`` holds, and the one after its last. With more ranks than KV heads several hold the same one."""
    if num_kv_heads % size == 0:
        part = num_kv_heads // size
        return rank * part, (rank + 1) * part
    assert size % num_kv_heads == 0, f"{num_kv_heads} KV heads over {size} ranks"
    head = rank * num_kv_heads // size
    return head, head + 1


def rank_config(config: ModelConfig, size: int) -> ModelConfig:
    """The shape of one rank's K/V cache: ``config`` with the number of KV heads that a rank holds."""
    start, stop = kv_head_share(config.num_kv_heads, 0, size)
    return config if size == 1 else replace(config, num_kv_heads=stop - start)


def _misfit(config: ModelConfig, size: int) -> str | None:
    for name, divides in _RULES.items():
        count = getattr(config, name)
        if not divides(count, size):
            how = "neither divides by it nor divides it" if name == "num_kv_heads" else "does not divide by it"
            return f"{name}={count} {how}"
    return None


def _evenly(count: int, size: int) -> bool:
    return count % size == 0


def _evenly_or_repeated(count: int, size: int) -> bool:
    return count % size == 0 or size % count == 0


_RULES: dict[str, Callable[[int, int], bool]] = {
    "num_kv_heads": _evenly_or_repeated,
    "num_heads": _evenly,
    "intermediate_size": _evenly,
}
