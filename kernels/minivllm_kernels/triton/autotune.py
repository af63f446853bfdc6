"""Which of a few configurations a kernel is launched with on this card: measured once, remembered on disk.

Owns the file of choices, ``triton-choices.json`` in the directory of compiled kernels, keyed by card, triton version, op and
the caller's key of the shape. Knows no kernel: the caller names the candidates and measures one. Nothing is ever measured
while a CUDA graph is captured; the caller's first candidate, which must always do, is taken then, and not remembered.

Only ops whose best configuration cannot be told from the shape use this. A candidate must not change what is computed in
the last bit between batches of one engine, so a key may hold head sizes and dtypes and never the number of sequences.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from threading import Lock

import torch
import triton
from triton.runtime.errors import OutOfResources

from minivllm_kernels.cpu.build import kernel_cache_directory

__all__ = ["FILE_NAME", "Choices", "choose", "milliseconds"]

FILE_NAME = "triton-choices.json"


class Choices:
    """What was chosen, by key, in memory and in one JSON file. Threads and processes may share the file: each write replaces it
    whole by what was in it and what is new, so at worst a choice is measured again.

    A file that cannot be read counts as empty, and one that cannot be written is done without: choosing must not fail.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = Lock()
        self._known: dict[str, str] | None = None

    def pick(self, key: str, candidates: Sequence[str], measure: Callable[[int], float], *, may_measure: bool = True) -> int:
        """Index of the candidate to use.

        Args:
            candidates: names that say all about a configuration; the first is taken while nothing may be measured.
            measure: milliseconds of the candidate with this index; infinity for one that cannot be launched.
        """
        with self._lock:
            if self._known is None:
                self._known = self._read()
            chosen = self._known.get(key)
            if chosen in candidates:
                return candidates.index(chosen)
            if not may_measure or len(candidates) == 1:
                return 0
            times = [measure(index) for index in range(len(candidates))]
            best = times.index(min(times))
            self._known[key] = candidates[best]
            self._write(key, candidates[best])
            return best

    def _read(self) -> dict[str, str]:
        try:
            found = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return {key: value for key, value in found.items() if isinstance(value, str)} if isinstance(found, dict) else {}

    def _write(self, key: str, chosen: str) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self._read() | {key: chosen}, indent=1, sort_keys=True)
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=self.path.parent, delete=False) as file:
                file.write(text)
            os.replace(file.name, self.path)
        except OSError:
            return


def choose(op: str, shape: str, candidates: Sequence[str], measure: Callable[[int], float], device: torch.device) -> int:
    """Index of the configuration that ``op`` is to use for ``shape`` on this device; see :meth:`Choices.pick`.

    On a CPU, which interprets kernels, it is always 0.
    """
    if device.type != "cuda":
        return 0
    key = f"{torch.cuda.get_device_name(device)} | triton {triton.__version__} | {op} | {shape}"
    return _choices(kernel_cache_directory()).pick(
        key, candidates, measure, may_measure=not torch.cuda.is_current_stream_capturing()
    )


def milliseconds(launch: Callable[[], object], repeats: int = 10) -> float:
    """Median time of ``launch`` on the current CUDA stream, after two that compile and warm up; infinity if it does not launch.

    Synchronises with the device: for choosing a configuration, before anything is served.
    """
    try:
        for _ in range(2):
            launch()
    except OutOfResources:
        return float("inf")
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]  # torch's
    marks[0].record()
    for mark in marks[1:]:
        launch()
        mark.record()
    marks[-1].synchronize()
    times: list[float] = sorted(before.elapsed_time(after) for before, after in pairwise(marks))
    return times[len(times) // 2]


@cache
def _choices(directory: Path) -> Choices:
    return Choices(directory / FILE_NAME)
