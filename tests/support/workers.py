"""How many processes ``pytest -n auto`` runs the tests in, and how many threads torch and the CPU kernels may have in each."""

import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["available_cores", "num_workers", "threads_of_a_worker"]

FEWEST_FILES = 8  # a worker imports and collects for itself, which takes as long as the tests of a few files
MOST_WORKERS = 8  # each holds torch, LiteLLM and the real model: some 2 GiB


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_workers(arguments: Sequence[str], cores: int) -> int:
    """One a core for whole folders; none, which is pytest's own process, where the arguments name few files or one core is there.

    Args:
        arguments: files, folders and node ids, as pytest takes them.
    """
    files: set[Path] = set()
    for argument in arguments:
        place = Path(argument.partition("::")[0])
        files.update(place.rglob("test_*.py") if place.is_dir() else [place])
    workers = min(cores, MOST_WORKERS)
    return workers if workers > 1 and len(files) >= FEWEST_FILES else 0


def threads_of_a_worker(cores: int, workers: int) -> int:
    """Threads wait for each other spinning: more of them than cores would take turns at that."""
    return max(1, cores // workers)
