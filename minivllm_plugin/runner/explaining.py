"""What computes a model, op by op, and how its steps were launched: for people, and for a warning when it is the slow way."""

import logging
from collections import defaultdict
from collections.abc import Iterable

from minivllm_kernels.dispatch import Choice
from minivllm_plugin.runner.step_counts import StepCounts

__all__ = ["explain_choices", "explain_steps", "warn_of_plain_torch"]

logger = logging.getLogger(__name__)

PLAIN_TORCH = "reference"
# Plain torch is what these are meant to run on: a library's matrix product, and a gather.
AT_HOME_IN_TORCH = ("linear", "embedding")


def explain_choices(choices: Iterable[Choice]) -> dict[str, str]:
    """Op -> its backend, and why those before it were passed over."""
    rows = {}
    for choice in choices:
        reasons = "; ".join(f"not {name}: {reason}" for name, reason in choice.passed_over)
        rows[choice.op] = choice.backend + (f"  ({reasons})" if reasons else "")
    return rows


def explain_steps(counts: StepCounts, mode: str, sizes: tuple[int, ...]) -> str:
    """One line: how graphs are used, and why steps ran without."""
    eager = "; ".join(f"{number} eager: {reason}" for reason, number in counts.eager_steps.items())
    if not sizes:
        return f"none ({eager})" if eager else "none"
    said = f"{mode}, up to {sizes[-1]} sequences, {counts.graph_captures} captured, {counts.graph_replays} steps replayed"
    return f"{said}, {eager}" if eager else said


def warn_of_plain_torch(choices: Iterable[Choice], device: str) -> None:
    """Say in one line which ops are computed by plain torch though ``device`` has kernels of ours, and why."""
    ops: defaultdict[str, list[str]] = defaultdict(list)
    for choice in choices:
        if choice.backend != PLAIN_TORCH or choice.op in AT_HOME_IN_TORCH:
            continue
        reasons = [f"{name}: {reason}" for name, reason in choice.passed_over if not reason.startswith("serves only")]
        ops["; ".join(reasons) or "no other is installed"].append(choice.op)
    if ops:
        why = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in ops.items())
        logger.warning("plain torch computes on %s, which is slower: %s", device, why)
