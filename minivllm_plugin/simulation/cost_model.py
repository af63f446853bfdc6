"""How long a step takes: a linear model of the work in it, with coefficients that are never negative.

Knows neither scheduler nor clock; :mod:`minivllm_plugin.simulation.measuring` fetches the records that it is fitted from.
"""

import json
import math
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceABC
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from minivllm_plugin.errors import ConfigError

if TYPE_CHECKING:
    import numpy

    from minivllm_plugin.engine.sequence import Sequence

__all__ = ["CostFunction", "CostModel", "StepRecord", "StepWork"]

FORMAT = 1
REFITS = 4


class StepWork(NamedTuple):
    """What one step computes, in tokens.

    Attributes:
        num_prefill_tokens: of rows with more than one token.
        num_decodes: rows with one.
        num_context_tokens: whose K/V these rows read, their own included.
        prefill_attention: pairs of a token of a longer row and a token that it looks at, itself included.
    """

    num_prefill_tokens: int
    num_decodes: int
    num_context_tokens: int
    prefill_attention: int

    @classmethod
    def of(cls, batch: "Iterable[Sequence]") -> "StepWork":
        """Of a scheduled batch, before it is taken in."""
        prefill = decodes = context = attention = 0
        for seq in batch:
            scheduled, computed = seq.num_scheduled_tokens, seq.num_computed_tokens
            if scheduled == 1:
                decodes += 1
                context += computed + 1
            else:
                prefill += scheduled
                attention += scheduled * computed + scheduled * (scheduled + 1) // 2
        return cls(prefill, decodes, context, attention)


class StepRecord(NamedTuple):
    """One measured step."""

    work: StepWork
    seconds: float


CostFunction: TypeAlias = Callable[[StepWork], float]
"""Seconds of a step; more than 0."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a step = the sum of these coefficients times the work.

    Attributes:
        per_step: seconds of any step.
        per_prefill_token, per_decode, per_context_token, per_attention_pair: seconds for each unit of :class:`StepWork`.
        per_mixed_step: seconds of a step that holds both prefill tokens and decodes, on top.
        description: where the figures come from.
        error: of a fit: mean absolute error over mean step time, on the records that it was fitted to; NaN otherwise.
    """

    per_step: float
    per_prefill_token: float = 0.0
    per_decode: float = 0.0
    per_context_token: float = 0.0
    per_attention_pair: float = 0.0
    per_mixed_step: float = 0.0
    description: str = ""
    error: float = field(default=math.nan, compare=False)

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} must be a finite number of seconds of at least 0, got {value!r}")
        if not any(getattr(self, name) for name in COEFFICIENTS):
            raise ConfigError("a cost model needs one coefficient above 0, or time would stand still")

    def __call__(self, work: StepWork) -> float:
        prefill, decodes, context, attention = work
        seconds = self.per_step + self.per_decode * decodes + self.per_context_token * context
        if prefill:
            seconds += self.per_prefill_token * prefill + self.per_attention_pair * attention
            if decodes:
                seconds += self.per_mixed_step
        return seconds

    @classmethod
    def illustrative(cls) -> "CostModel":
        """Round numbers of the size that a model of a few billion parameters has on one accelerator. Measured nowhere: good for
        comparing policies with each other, not for predicting a machine."""
        return cls(8e-3, 20e-6, 100e-6, 5e-9, 5e-10, description="illustrative round numbers, measured nowhere")

    @classmethod
    def fit(cls, records: SequenceABC[StepRecord], description: str = "fitted") -> "CostModel":
        """Least squares over measured steps, coefficients not below 0.

        Each step is weighted by one over the time that the fit itself expects, so that many short steps and few long ones count
        alike. (Weighted by the measured time, steps that were held up would hardly count, and sums would come out too short.)

        Raises:
            ConfigError: no records, or a time that is not positive.
        """
        import numpy

        if not records:
            raise ConfigError("a cost model is fitted to at least one measured step; there are none")
        seconds = numpy.array([record.seconds for record in records], dtype=float)
        if not (numpy.isfinite(seconds).all() and (seconds > 0).all()):
            raise ConfigError("measured steps must take a finite time greater than 0")
        features = numpy.array([_features(record.work) for record in records], dtype=float)
        scale = numpy.maximum(numpy.abs(features).max(axis=0), 1.0)
        expected = seconds
        for _ in range(REFITS):
            solution = _non_negative_least_squares(features / scale / expected[:, None], seconds / expected) / scale
            expected = numpy.maximum(features @ solution, seconds.min() / 2)
        error = float(numpy.abs(features @ solution - seconds).mean() / seconds.mean())
        return cls(**dict(zip(COEFFICIENTS, map(float, solution), strict=True)), description=description, error=error)

    def save(self, path: str | Path) -> None:
        """Write the coefficients as JSON."""
        values = {"format": FORMAT, **asdict(self)}
        values["error"] = None if math.isnan(self.error) else self.error
        Path(path).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> "CostModel":
        """Read what :meth:`save` wrote.

        Raises:
            ConfigError: no such file, or not such a file.
        """
        try:
            values: dict[str, Any] = json.loads(Path(path).read_text(encoding="utf-8"))
            found = values.pop("format")
            error = values.pop("error", None)
            if found != FORMAT:
                raise ConfigError(f"{path}: cost model of format {found!r}, this version reads {FORMAT}; measure again")
            return cls(**values, error=math.nan if error is None else float(error))
        except OSError as problem:
            raise ConfigError(
                f"{path}: cannot be read ({problem}); `minivllm simulate --measure MODEL` makes a cost model"
            ) from problem
        except (ValueError, KeyError, AttributeError, TypeError) as problem:
            if isinstance(problem, ConfigError):
                raise
            raise ConfigError(f"{path}: is no cost model ({type(problem).__name__}: {problem})") from problem


COEFFICIENTS = ("per_step", "per_prefill_token", "per_decode", "per_context_token", "per_attention_pair", "per_mixed_step")


def _features(work: StepWork) -> tuple[float, ...]:
    """In the order of COEFFICIENTS."""
    prefill, decodes, context, attention = work
    return (1.0, prefill, decodes, context, attention, float(bool(prefill and decodes)))


def _non_negative_least_squares(
    matrix: "numpy.ndarray[Any, Any]", target: "numpy.ndarray[Any, Any]"
) -> "numpy.ndarray[Any, Any]":
    """Lawson and Hanson's active-set method, for a handful of columns."""
    import numpy

    columns = matrix.shape[1]
    solution = numpy.zeros(columns)
    free = numpy.zeros(columns, dtype=bool)
    tolerance = 1e-10 * float(numpy.abs(matrix.T @ target).max() or 1.0)
    for _ in range(10 * columns):
        gradient = matrix.T @ (target - matrix @ solution)
        if free.all() or float(gradient[~free].max()) <= tolerance:
            break
        free[int(numpy.argmax(numpy.where(free, -numpy.inf, gradient)))] = True
        while True:
            trial = numpy.zeros(columns)
            trial[free] = numpy.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            if float(trial[free].min()) > 0:
                solution = trial
                break
            blocked = free & (trial <= 0)
            step = float((solution[blocked] / numpy.maximum(solution[blocked] - trial[blocked], 1e-300)).min())
            solution = solution + step * (trial - solution)
            free &= solution > 1e-15
            solution[~free] = 0.0
            if not free.any():
                break
    return solution
