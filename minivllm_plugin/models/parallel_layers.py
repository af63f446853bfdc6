"""Layers of which each rank of a tensor-parallel engine holds a part (Shoeybi et al. 2019).

A matrix split by rows (of ``weight [out, in]``: its outputs) needs nobody else; one split by columns gives partial sums, which
the ranks add. A block is one of the first kind followed by one of the second, so it costs one sum. With one rank
(:data:`~minivllm_plugin.parallel.context.SINGLE`) each is the plain layer.

Each layer is its own weight loader: :meth:`cuts` says which part of which checkpoint tensor this rank keeps.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from minivllm_kernels import embedding, linear
from minivllm_plugin.models.layers import Cut, PartitionedLayer, make_parameter
from minivllm_plugin.parallel.context import SINGLE, ParallelContext
from minivllm_plugin.parallel.partition import kv_head_share

__all__ = [
    "ColumnParallelLinear",
    "MergedColumnParallelLinear",
    "ParallelLMHead",
    "QKVParallelLinear",
    "RowParallelLinear",
    "VocabParallelEmbedding",
]


class ColumnParallelLinear(PartitionedLayer):
    """``x [T, in] -> [T, out / size]``: this rank's outputs, section after section.

    Args:
        in_features: of the whole layer, as all sizes here are.
        out: what this rank keeps of each section of the outputs.
        bias: whether there is one; it is split like the outputs.
    """

    def __init__(self, in_features: int, out: tuple[Cut, ...], *, bias: bool = False) -> None:
        super().__init__()
        self._out = out
        rows = sum(cut.stop - cut.start for cut in out)
        self.weight = make_parameter(rows, in_features)
        self.bias = make_parameter(rows) if bias else None

    def cuts(self, attribute: str) -> tuple[Cut, ...]:
        return self._out

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several layers of one input as one matrix product: ``[T, in] -> [T, sum of sections / size]``.

    Args:
        sections: name in checkpoints -> outputs, in order. Each divides by the number of ranks.
    """

    def __init__(
        self, in_features: int, sections: Mapping[str, int], *, bias: bool = False, parallel: ParallelContext = SINGLE
    ) -> None:
        out = tuple(Cut(size, *parallel.share(size), section) for section, size in sections.items())
        super().__init__(in_features, out, bias=bias)


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value of attention: ``[T, in] -> [T, (num_heads + 2 * num_kv_heads) * head_dim]`` of this rank's heads.

    Attributes:
        num_heads, num_kv_heads: heads of this rank. Query head h uses KV head ``h // (num_heads // num_kv_heads)``, as in the
            whole.
    """

    def __init__(
        self,
        in_features: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        parallel: ParallelContext = SINGLE,
    ) -> None:
        heads = parallel.share(num_heads)
        kv_heads = kv_head_share(num_kv_heads, parallel.rank, parallel.size)
        kept = {"q_proj": (num_heads, heads), "k_proj": (num_kv_heads, kv_heads), "v_proj": (num_kv_heads, kv_heads)}
        out = tuple(
            Cut(count * head_dim, start * head_dim, stop * head_dim, section) for section, (count, (start, stop)) in kept.items()
        )
        super().__init__(in_features, out, bias=bias)
        self.num_heads, self.num_kv_heads = heads[1] - heads[0], kv_heads[1] - kv_heads[0]


class RowParallelLinear(PartitionedLayer):
    """``x [T, in / size] -> [T, out]``: each rank multiplies its inputs, and all add up the results.

    The bias is rank 0's alone, so that the sum holds it once.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False, parallel: ParallelContext = SINGLE) -> None:
        super().__init__()
        self._in = Cut(in_features, *parallel.share(in_features), dim=1)
        self._parallel = parallel
        self.weight = make_parameter(out_features, self._in.stop - self._in.start)
        self.bias = make_parameter(out_features) if bias and parallel.rank == 0 else None

    def cuts(self, attribute: str) -> tuple[Cut, ...]:
        rows = self.weight.shape[0]
        return (self._in,) if attribute == "weight" else (Cut(rows, 0, rows),)

    def forward(self, x: Tensor) -> Tensor:
        return self._parallel.all_reduce(linear(x, self.weight, self.bias))


class _VocabularyLayer(PartitionedLayer):
    """``weight [ceil(vocab_size / size), C]``: the rows of this rank's tokens; past the vocabulary zeros, which nobody reads."""

    def __init__(self, vocab_size: int, size: int, parallel: ParallelContext) -> None:
        super().__init__()
        rows = -(-vocab_size // parallel.size)
        start = min(parallel.rank * rows, vocab_size)
        self._kept = Cut(vocab_size, start, min(start + rows, vocab_size))
        self._parallel = parallel
        self.weight = make_parameter(rows, size)

    def cuts(self, attribute: str) -> tuple[Cut, ...]:
        return (self._kept,)

    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [S, C] -> [S, vocab_size]`` on rank 0; ``[S, 0]`` on the others."""
        parts = self._parallel.gather(linear(hidden, self.weight))
        if parts is None:
            return hidden.new_empty(hidden.shape[0], 0)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)[:, : self._kept.size]


class VocabParallelEmbedding(_VocabularyLayer):
    """``token_ids [T] -> [T, size]``: each rank looks up its own tokens, and all add up. Tied, it is the head as well."""

    def __init__(self, vocab_size: int, size: int, parallel: ParallelContext = SINGLE) -> None:
        super().__init__(vocab_size, size, parallel)

    def forward(self, token_ids: Tensor) -> Tensor:
        if self._parallel.size == 1:
            return embedding(token_ids, self.weight)
        places = token_ids - self._kept.start
        elsewhere = (places < 0) | (places >= self._kept.stop - self._kept.start)
        rows = embedding(places.masked_fill(elsewhere, 0), self.weight)
        return self._parallel.all_reduce(rows.masked_fill(elsewhere.unsqueeze(1), 0.0))


class ParallelLMHead(_VocabularyLayer):
    """The output layer of a model that does not tie it: ``hidden [S, C] -> [S, vocab_size]`` on rank 0."""

    def __init__(self, size: int, vocab_size: int, parallel: ParallelContext = SINGLE) -> None:
        super().__init__(vocab_size, size, parallel)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden)
