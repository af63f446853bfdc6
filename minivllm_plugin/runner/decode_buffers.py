"""The tensors that decode graphs read: allocated once, never moved, filled for every batch by one copy.

Rows past the batch are padding: token 0 at position 0, slot -1 (nothing is stored), length 0 (nothing is read).
"""

from itertools import repeat
from typing import Any

import numpy as np
import torch
from torch import Tensor

from minivllm_kernels import AttentionMetadata, DrawTensors, TokenDraw
from minivllm_plugin.runner.device_inputs import BatchInputs
from minivllm_plugin.runner.device_sampler import GREEDY
from minivllm_plugin.runner.host_buffer import HostBuffer, pack
from minivllm_plugin.runner.step_layout import NOT_PENDING, StepLayout

__all__ = ["DecodeBuffers"]

NO_SLOT = -1
NO_TABLE: list[int] = []


class _HostImage:
    """What the device memory is to hold, and which tables stand in it: most do not change from step to step."""

    def __init__(self, buffer: HostBuffer, arrays: dict[str, "np.ndarray[Any, Any]"], rows: int) -> None:
        self.buffer = buffer
        self.arrays = arrays
        self.tables: list[list[int]] = [NO_TABLE] * rows


class DecodeBuffers:
    """Inputs of up to ``rows`` sequences with one new token each.

    Args:
        rows: most sequences of a batch.
        width: most blocks of a sequence.
        block_size: tokens per block.
        device: where they are.
    """

    def __init__(self, rows: int, width: int, block_size: int, device: torch.device) -> None:
        self.rows, self.width, self._block_size = rows, width, block_size
        sections = pack(
            [
                *((name, torch.int64, (rows,)) for name in ("token_ids", "positions", "slots", "sources")),
                ("lengths", torch.int32, (rows,)),
                ("block_tables", torch.int32, (rows, width)),  # last, since only the rows of the batch are sent
            ]
        )
        self._tables_offset = sections[-1].offset
        num_bytes = sections[-1].end
        self._memory = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        views = {section.name: section.of(self._memory) for section in sections}
        self._token_ids, self._sources = views["token_ids"], views["sources"]
        self._positions, self._slots, self._lengths = views["positions"], views["slots"], views["lengths"]
        self._tables = views["block_tables"]
        self._query_starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(rows, dtype=torch.int64, device=device)
        self.last_tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.draws = DrawTensors.allocate(rows, device)
        self.draws.copy_from(DrawTensors.build([GREEDY] * rows, "cpu"))
        self._host_draws = [_HostDraws(rows, device) for _ in range(2)]
        self._hosts = []
        for _ in range(2):  # in turn: one is filled while the other is still being copied
            buffer = HostBuffer(num_bytes, device)
            arrays = {section.name: section.of(buffer.memory).numpy() for section in sections}
            arrays["block_tables"][:] = 0
            self._hosts.append(_HostImage(buffer, arrays, rows))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that graphs read, by name; for whoever wants to know that none of it moves."""
        return {
            "token_ids": self._token_ids,
            "positions": self._positions,
            "slots": self._slots,
            "sources": self._sources,
            "lengths": self._lengths,
            "block_tables": self._tables,
            "query_starts": self._query_starts,
            "last_tokens": self.last_tokens,
            "draws": self.draws.packed,
        }

    def fill(self, layout: StepLayout, size: int) -> None:
        """Send a decode batch, padded to ``size`` rows."""
        self._hosts.reverse()
        image = self._hosts[0]
        image.buffer.wait()
        count = layout.num_sequences
        for name, values, padding in (
            ("token_ids", layout.token_ids, 0),
            ("positions", layout.positions, 0),
            ("slots", layout.slots, NO_SLOT),
            ("sources", layout.sources or [NOT_PENDING] * count, NOT_PENDING),
            ("lengths", layout.seq_lens, 0),
        ):
            array = image.arrays[name]
            array[:count] = values
            array[count:size] = padding
        _write_tables(image, layout.block_tables)
        image.buffer.send(self._memory, self._tables_offset + count * self.width * self._tables.itemsize)

    def fill_draws(self, draws: list[TokenDraw]) -> None:
        """Send how tokens are drawn; greedy in the rows that follow."""
        self._host_draws.reverse()
        self._host_draws[0].send(draws, self.draws)

    def batch(self, layout: StepLayout) -> BatchInputs:
        """The batch that was filled in last, without its padding, for whoever takes something from its hidden states."""
        count = layout.num_sequences
        token_ids, positions, metadata = self._token_ids[:count], self._positions[:count], self._metadata(count)
        return BatchInputs(token_ids, positions, metadata, self._rows[:count], self._rows[:0], is_replayed=True)

    def pad(self, size: int, length: int = 0) -> None:
        """Make the first ``size`` rows padding, on the device alone; with a ``length`` they read as much of block 0."""
        for tensor, value in (
            (self._token_ids, 0),
            (self._positions, 0),
            (self._slots, NO_SLOT),
            (self._sources, NOT_PENDING),
            (self._lengths, length),
            (self._tables, 0),
        ):
            tensor[:size] = value

    def inputs(self, size: int) -> tuple[Tensor, Tensor, AttentionMetadata]:
        """Token ids, positions and metadata of the first ``size`` rows, for one pass that may be captured."""
        sources = self._sources[:size]
        # A row that failed has no token; its request has ended, and any id will do for what nobody will see.
        pending = self.last_tokens.index_select(0, sources.clamp(min=0)).clamp(min=0)
        token_ids = torch.where(sources < 0, self._token_ids[:size], pending)
        return token_ids, self._positions[:size], self._metadata(size)

    def _metadata(self, size: int) -> AttentionMetadata:
        return AttentionMetadata(
            query_lens=tuple(repeat(1, size)),
            seq_lens=None,
            block_tables=self._tables[:size],
            slot_mapping=self._slots[:size],
            block_size=self._block_size,
            query_starts=self._query_starts[: size + 1],
            lengths=self._lengths[:size],
            max_seq_len=self.width * self._block_size,
        )


class _HostDraws:
    """Draws on the host, on their way to the device."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._device = device
        is_asynchronous = device.type == "cuda"
        self._draws = DrawTensors.allocate(rows, "cpu", pinned=is_asynchronous)
        self._done: Any = torch.cuda.Event() if is_asynchronous else None  # type: ignore[no-untyped-call]  # of torch

    def send(self, draws: list[TokenDraw], target: DrawTensors) -> None:
        if self._done is not None:
            self._done.synchronize()
        self._draws.fill(draws)
        target.copy_from(self._draws)
        if self._done is not None:
            self._done.record(torch.cuda.current_stream(self._device))


def _write_tables(image: _HostImage, tables: list[list[int]]) -> None:
    array = image.arrays["block_tables"]
    for row, table in enumerate(tables):
        written = image.tables[row]
        if written == table:
            continue
        known = len(written) if table[: len(written)] == written else 0  # one more block: the usual change
        array[row, known : len(table)] = table[known:]
        image.tables[row] = table.copy()
