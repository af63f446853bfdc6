"""Clocks around the parts of a live engine, put there from outside: nothing in the engine knows of them."""

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from minivllm_plugin.engine.llm_engine import LLMEngine, StepOutput

__all__ = ["StepClock", "StepTimes"]


@dataclass(slots=True)
class StepTimes:
    """One step: when it began and ended (``time.perf_counter()``), and the seconds spent in each part of it."""

    begin: float
    end: float = 0.0
    kernels: float = 0.0
    run: float = 0.0
    schedule: float = 0.0
    postprocess: float = 0.0
    is_prefill: bool = False
    num_sequences: int = 0


@dataclass
class StepClock:
    """Collects the steps of one engine. Everything but the constructor's caller runs on the engine thread."""

    steps: list[StepTimes] = field(default_factory=list)

    def attach(self, engine: LLMEngine) -> None:
        """Time the engine's steps, its runner and its scheduler from now on."""
        self._around(engine.runner, "run", "run")
        self._around(engine.scheduler, "schedule", "schedule")
        self._around(engine.scheduler, "postprocess", "postprocess")
        step, name = engine.step, "step"

        def timed() -> StepOutput:
            times = StepTimes(time.perf_counter())
            self.steps.append(times)
            output = step()
            times.end = time.perf_counter()
            times.is_prefill, times.num_sequences = output.is_prefill, len(output.batch)
            return output

        setattr(engine, name, timed)

    @contextmanager
    def timing_calls(self, library: ctypes.CDLL, names: tuple[str, ...]) -> Iterator[None]:
        """Count what these functions of a compiled library take as ``kernels``, for everybody who looks them up meanwhile."""
        originals = {name: getattr(library, name) for name in names}
        for name in names:
            self._around(library, name, "kernels")
        try:
            yield
        finally:
            for name, function in originals.items():
                setattr(library, name, function)

    def _around(self, owner: object, name: str, part: str) -> None:
        original: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return original(*arguments)
            finally:
                if self.steps:  # else it is called before any step, by the loader
                    step = self.steps[-1]
                    setattr(step, part, getattr(step, part) + time.perf_counter() - begin)

        setattr(owner, name, timed)
