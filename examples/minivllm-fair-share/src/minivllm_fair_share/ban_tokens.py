"""A logits processor: tokens that a request must never get. ``SamplingParams(extra_args={"ban_tokens": [13, 42]})``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # a plugin is imported at every start; what it needs for its annotations only, it need not load
    from torch import Tensor

    from minivllm_plugin import SamplingParams
    from minivllm_plugin.extensions.logits import LogitsRow
    from minivllm_plugin.extensions.requests import RequestStart

__all__ = ["BanTokens"]


class BanTokens:
    """The value is a list of token ids."""

    argmax_invariant = False  # the likeliest token may be a banned one, so greedy requests need it, too

    def validate(self, value: Any, params: "SamplingParams") -> None:
        """On the caller's thread, before the request is queued: the right place to be strict."""
        if not isinstance(value, list | tuple) or not value:
            raise ValueError("it must be a list of token ids")
        for token_id in value:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
                raise ValueError(f"{token_id!r} is no token id")

    def new_state(self, request: "RequestStart") -> None:
        """Nothing to remember between tokens; so all rows of a step come in one call."""
        return

    def apply(self, logits: "Tensor", rows: "Sequence[LogitsRow]") -> None:
        """``logits [R, V]``, changed in place. An id beyond the vocabulary raises: that request fails, its neighbours go on."""
        for index, row in enumerate(rows):
            logits[index, list(row.value)] = float("-inf")
