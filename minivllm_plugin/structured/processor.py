"""Masks every token that cannot continue a constrained completion. A logits processor like any other; engine thread.

The state of a request is its matcher and how many tokens it has seen, so it follows from the completion alone: preemption,
chunking and being asked twice change nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.extensions.logits import LogitsRow
from minivllm_plugin.extensions.requests import RequestStart
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.structured.compiler import CompiledGrammar

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

__all__ = ["NAME", "StructuredOutputProcessor"]

NAME = "structured_outputs"
"""Under which it stands in ``SamplingParams.extra_args``; the value is a :class:`CompiledGrammar`."""


@dataclass(slots=True)
class _State:
    matcher: Any
    mask: "numpy.ndarray[Any, Any]"  # one bit a token, int32 words
    num_consumed: int = 0


class StructuredOutputProcessor:
    """Allows, in each row, only tokens after which the completion can still be finished; after its end only end tokens.

    Attributes:
        num_masks, mask_seconds: how many masks were computed, and the time that took in all: what a report divides.
    """

    argmax_invariant = False
    repeatable = True

    def __init__(self) -> None:
        self.num_masks = 0
        self.mask_seconds = 0.0

    def validate(self, value: Any, params: SamplingParams) -> None:
        """Refuse what could never end, or what did not come from a compiler."""
        if not isinstance(value, CompiledGrammar):
            raise InvalidRequestError(
                f"{NAME} in extra_args is set by the engine; pass SamplingParams(structured_outputs=…) instead of {value!r:.100}"
            )

    def new_state(self, request: RequestStart) -> _State:
        import numpy

        compiled: CompiledGrammar = request.value
        return _State(compiled.new_matcher(), numpy.zeros((compiled.vocab_size + 31) // 32, dtype=numpy.int32))

    def apply(self, logits: "Tensor", rows: Sequence[LogitsRow]) -> None:
        import numpy
        import torch

        began = time.perf_counter()
        width = logits.shape[1]
        forbidden = numpy.empty((len(rows), width), dtype=numpy.bool_)
        for index, row in enumerate(rows):
            mask = _next_mask(row)
            allowed = numpy.unpackbits(mask.view(numpy.uint8), count=width, bitorder="little")
            numpy.equal(allowed, 0, out=forbidden[index])
        logits.masked_fill_(torch.from_numpy(forbidden).to(logits.device), float("-inf"))
        self.num_masks += len(rows)
        self.mask_seconds += time.perf_counter() - began


def _next_mask(row: LogitsRow) -> "numpy.ndarray[Any, Any]":
    state: _State = row.state
    tokens = row.output_token_ids[state.num_consumed :]
    if tokens and not state.matcher.consume_tokens(tokens):
        raise ValueError(f"the completion left the grammar: {state.matcher.get_error()}")
    state.num_consumed += len(tokens)
    state.matcher.unsafe_compute_mask_ptr(state.mask.ctypes.data, state.mask.nbytes)
    if state.matcher.is_error():
        raise ValueError(f"the grammar cannot be followed any further: {state.matcher.get_error()}")
    return state.mask
