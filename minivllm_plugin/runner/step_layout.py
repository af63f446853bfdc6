"""One batch in plain numbers: which tokens at which positions go to which slots. Reads sequences, changes nothing.

No tensor and no device here, so that a layout can be made once and given to several processes.
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceABC
from dataclasses import dataclass

from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.runner.rows import LogitRows

__all__ = ["NOT_PENDING", "StepLayout", "lay_out"]

NOT_PENDING = -1
NOWHERE: Mapping[Sequence, int] = {}


@dataclass(frozen=True, slots=True)
class StepLayout:
    """B sequences with T new tokens in all, sequence after sequence.

    Attributes:
        token_ids: T ids; 0 where the token is still on the device.
        positions: T, each token's index in its own sequence.
        slots: T, where its key and value go.
        sources: T row numbers among the tokens that the preceding launch sampled, or ``NOT_PENDING``; empty when the host knows
            every token.
        query_lens, seq_lens: B; as in :class:`minivllm_kernels.AttentionMetadata`.
        block_tables: B lists of block ids, the sequences' own: valid until the scheduler goes on.
        wanted: what is taken from which rows.
    """

    token_ids: list[int]
    positions: list[int]
    slots: list[int]
    sources: list[int]
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    block_tables: list[list[int]]
    wanted: LogitRows

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens)

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token, so that row b is sequence b."""
        return len(self.token_ids) == len(self.query_lens)

    @property
    def max_blocks(self) -> int:
        """Width of a table that holds all of them."""
        return max(map(len, self.block_tables), default=0)


def lay_out(seqs: SequenceABC[Sequence], block_size: int, rows: Mapping[Sequence, int] = NOWHERE) -> StepLayout:
    """Tokens ``num_computed .. num_computed + num_scheduled - 1`` of every sequence.

    Args:
        rows: the row of each sequence that the preceding launch sampled a token for.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    sources: list[int] = []
    query_lens, seq_lens = [], []
    wanted = LogitRows()
    for index, seq in enumerate(seqs):
        start = seq.num_computed_tokens
        count = seq.num_scheduled_tokens
        end = start + count
        first = len(token_ids)
        table = seq.block_table
        wanted.add(index, seq, first)
        if count == 1:  # most sequences of most batches
            positions.append(start)
            slots.append(table[start // block_size] * block_size + start % block_size)
        else:
            positions += range(start, end)
            slots += [table[position // block_size] * block_size + position % block_size for position in range(start, end)]
        token_ids += seq.token_ids[start:end]
        if len(token_ids) < first + count:  # the last one was sampled, but has not come to the host yet
            assert seq.num_pending_tokens == first + count - len(token_ids) == 1, "a token that nobody sampled"
            sources += [NOT_PENDING] * (len(token_ids) - len(sources))
            token_ids.append(0)
            sources.append(rows[seq])
        query_lens.append(count)
        seq_lens.append(end)
    if sources:
        sources += [NOT_PENDING] * (len(token_ids) - len(sources))
    tables = [seq.block_table for seq in seqs]
    return StepLayout(token_ids, positions, slots, sources, tuple(query_lens), tuple(seq_lens), tables, wanted)
