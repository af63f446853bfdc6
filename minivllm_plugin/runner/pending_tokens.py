"""Tokens that a launched batch will have sampled: on their way from the device, and waited for once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from minivllm_plugin.engine.runner import RunnerAnswers
from minivllm_plugin.runner.host_buffer import HostBuffer

__all__ = ["PendingTokens", "ResultBuffers"]

FIRST_ROWS = 256


class PendingTokens:
    """The result of one launch.

    Args:
        tokens: one a sequence; those at ``places`` are still to come.
        places: indices of the sequences that a token comes for.
        buffer, values: where they arrive, int64 ``[len(places)]``; None when nothing is to come.
    """

    def __init__(
        self,
        tokens: list[int | list[int]],
        places: Sequence[int] = (),
        buffer: HostBuffer | None = None,
        values: Tensor | None = None,
    ) -> None:
        self._tokens = tokens
        self._places = places
        self._buffer = buffer
        self._values = values

    def wait(self) -> RunnerAnswers:
        """One token a sequence, or ``FAILED_TOKEN``; the only wait for the device in a step. May be asked again."""
        if self._buffer is not None and self._values is not None:
            self._buffer.wait()
            for place, token in zip(self._places, self._values.tolist(), strict=True):
                self._tokens[place] = token
            self._buffer = self._values = None
        return self._tokens


class ResultBuffers:
    """Host memory for the tokens of two launches: one that the engine reads while the next is computed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers = [HostBuffer(FIRST_ROWS * 8, device) for _ in range(2)]
        self._users: list[PendingTokens | None] = [None, None]
        self._turn = 0

    def receive(self, sampled: Tensor, tokens: list[int | list[int]], places: Sequence[int]) -> PendingTokens:
        """Begin to fetch ``sampled``, int64 ``[len(places)]`` on the device, behind what computes it."""
        self._turn = 1 - self._turn
        user = self._users[self._turn]
        if user is not None:
            user.wait()  # nobody asked for it; whoever still will finds what it was
        if self._buffers[self._turn].memory.numel() < sampled.nbytes:
            self._buffers[self._turn] = HostBuffer(2 * sampled.nbytes, self._device)
        buffer = self._buffers[self._turn]
        pending = self._users[self._turn] = PendingTokens(tokens, places, buffer, buffer.receive(sampled))
        return pending
