"""Brings the ranks of one engine up: what cannot be shared is refused, processes are started, parts loaded, pools agreed on.

Runs on the engine thread, in the place of loading one whole model.
"""

import os
import sys
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.extensions import Extensions
from minivllm_plugin.extensions.registry import BUILTIN
from minivllm_plugin.models.catalog import ModelSource
from minivllm_plugin.models.loader import ModelDescription
from minivllm_plugin.parallel.groups import ProcessGroup, backend_for, refuse_without_backend
from minivllm_plugin.parallel.partition import check_partition
from minivllm_plugin.parallel.plan import RankPlan
from minivllm_plugin.parallel.ranks import Ranks
from minivllm_plugin.parallel.runner import TensorParallelRunner

__all__ = ["rank_devices", "start_ranks"]

POOL_BYTES = 8  # of the number of blocks, as it is told to the ranks


def start_ranks(
    config: EngineConfig,
    source: ModelSource,
    description: ModelDescription,
    device: str,
    end_token_ids: Collection[int],
    extensions: Extensions,
) -> TensorParallelRunner:
    """A runner over ``config.tensor_parallel_size`` processes, this one among them, each with its part of model and pool.

    Raises:
        ConfigError: the model, the device or a plugin does not go with several processes.
        ModelError: the weights cannot be read; of another rank, the message begins with its number.
        RankFailedError: another rank died.
    """
    size = config.tensor_parallel_size
    check_partition(description.config, size)
    _refuse_plugins(config, description, extensions)
    devices = rank_devices(device, size)
    backend = backend_for(torch.device(devices[0]))
    refuse_without_backend(backend)
    # Only this user can enter the directory, and the ranks are told of it through their pipes.
    directory = Path(tempfile.mkdtemp(prefix="minivllm-ranks-"))
    plan = RankPlan(
        rank=0,
        parent=os.getpid(),
        devices=devices,
        backend=backend,
        rendezvous=directory / "store",
        engine=replace(config, plugins=(), policies=(), block_plugins=(), chat_template=None),
        source=source,
        model=description.config,
        home=None if description.weights is None else description.weights.home,
    )
    ranks = Ranks(plan, _threads_of_a_rank(config, device))
    try:
        with ranks.explained():
            ranks.answers()  # everybody is there: from here on nobody is waited for who never started
            group = ProcessGroup(backend, plan.rendezvous, 0, size, torch.device(devices[0]))
            local = plan.load(group, end_token_ids)
            room = [local.plan_num_blocks(plan.engine), *(answer.num_blocks for answer in ranks.answers())]
            ranks.broadcast(min(room).to_bytes(POOL_BYTES, "little"))
            cache = local.allocate_kv_cache(min(room), config.block_size)
            local.capture_graphs()
            ranks.answers()
    except BaseException:
        ranks.close()
        raise
    return TensorParallelRunner(local, ranks, group, cache)


def rank_devices(device: str, size: int) -> tuple[str, ...]:
    """One device a rank: the CPU for all of them, or CUDA devices from ``device`` on.

    Raises:
        ConfigError: there are not so many, or the kind of device has no collectives here.
    """
    if sys.platform == "win32":
        raise ConfigError(f"tensor_parallel_size={size} needs a POSIX system; on Windows it must be 1")
    kind = torch.device(device).type
    if kind == "cpu":
        return ("cpu",) * size
    if kind != "cuda":
        raise ConfigError(f"tensor_parallel_size={size} works on cuda and cpu, the device is {device!r}; leave it at 1")
    first, count = torch.device(device).index or 0, torch.cuda.device_count()
    if first + size > count:
        raise ConfigError(
            f"tensor_parallel_size={size} from device {device!r} on needs {first + size} CUDA devices, this machine "
            f"shows {count}; set it to at most {count - first}"
        )
    return tuple(f"cuda:{first + rank}" for rank in range(size))


def _refuse_plugins(config: EngineConfig, description: ModelDescription, extensions: Extensions) -> None:
    """The other ranks have no plugins: a plugin's code runs in the user's process, after the logits, and nowhere else."""
    architecture = description.config.architecture
    what = None
    if extensions.models.owner(architecture) != BUILTIN:
        what = extensions.models.describe(architecture)
    elif len(extensions.attention):
        what = extensions.attention.describe(extensions.attention.names()[0])
    elif description.weights is not None and description.weights.is_foreign:
        what = "the weights, which a plugin's reader makes,"
    if what is not None:
        raise ConfigError(
            f"{what} cannot be used with tensor_parallel_size={config.tensor_parallel_size}: plugins are loaded in the first "
            "process only; leave tensor_parallel_size at 1, or leave the plugin out with block_plugins"
        )


def _threads_of_a_rank(config: EngineConfig, device: str) -> int:
    """On a CPU the ranks share its cores; beside a GPU one thread has little to do."""
    if torch.device(device).type != "cpu":
        return 1
    return max(1, (config.num_threads or torch.get_num_threads()) // config.tensor_parallel_size)
