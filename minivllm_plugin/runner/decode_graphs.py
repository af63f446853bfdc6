"""Decode steps as recorded graphs: which size serves which batch, recorded when it is first met, and played back.

Owns the graphs and their static buffers. A batch with a prompt in it runs eagerly as a whole: it has enough work to hide its
launches. So does a batch that no graph can hold, or whose graph could not be recorded, and then that is said.
"""

from collections.abc import Callable
from collections.abc import Sequence as SequenceABC
from enum import Enum
from typing import Any

import torch
from torch import Tensor

import minivllm_kernels as kernels
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.models.decoder import CausalLM
from minivllm_plugin.parallel.context import SINGLE, ParallelContext
from minivllm_plugin.runner.decode_buffers import DecodeBuffers
from minivllm_plugin.runner.device_inputs import BatchInputs
from minivllm_plugin.runner.device_sampler import choose_greedy, draws_of, is_greedy, samples_on_the_device
from minivllm_plugin.runner.graphs import Graph, GraphApi, graph_sizes, size_for
from minivllm_plugin.runner.kv_cache import KVCache
from minivllm_plugin.runner.step_counts import PROMPT, StepCounts
from minivllm_plugin.runner.step_layout import StepLayout

__all__ = ["DecodeGraphs", "Part"]

WARM_UP_LENGTH = 512  # tokens that each row reads before a capture, so that kernels which time themselves have work to time


class Part(Enum):
    """What is recorded by itself: the batch decides which second part follows the first."""

    FORWARD = "forward pass"  # tokens -> hidden states
    GREEDY = "greedy choice"  # hidden states -> logits -> tokens
    SAMPLED = "sampling"  # the same where any row is drawn


class DecodeGraphs:
    """Graphs of one model over one KV cache.

    Args:
        api: records and plays back.
        module: the model.
        cache: its keys and values.
        max_rows: most sequences of a batch.
        max_blocks: most blocks of a sequence.
        counts: what is told of captures and replays.
        parallel: this rank. Of several, only the first chooses tokens, so no choice is recorded: it would wait for the others.
    """

    def __init__(
        self,
        api: GraphApi,
        module: CausalLM,
        cache: KVCache,
        max_rows: int,
        max_blocks: int,
        counts: StepCounts,
        parallel: ParallelContext = SINGLE,
    ) -> None:
        self._api, self._module, self._cache, self._counts = api, module, cache, counts
        self._parallel = parallel
        self._parts = tuple(Part) if parallel.size == 1 else (Part.FORWARD,)
        self.sizes = graph_sizes(max_rows)
        weight = next(module.parameters())
        self.buffers = DecodeBuffers(max_rows, max_blocks, cache.block_size, weight.device)
        self._hidden = torch.zeros(max_rows, module.config.hidden_size, dtype=weight.dtype, device=weight.device)
        self._bodies = {Part.FORWARD: self._forward, Part.GREEDY: self._greedy, Part.SAMPLED: self._sampled}
        self._graphs: dict[tuple[Part, int], Graph] = {}
        self._broken: dict[Part, str] = {}
        self._pool: Any = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Everything that the graphs share with the host, by name; for whoever wants to know that none of it moves."""
        return {**self.buffers.tensors, "hidden": self._hidden}

    def why_not(self, layout: StepLayout) -> str | None:
        """Why a batch cannot be replayed; None: it can, unless its graph turns out not to be recordable."""
        wanted, count = layout.wanted, layout.num_sequences
        if not layout.is_decode or wanted.pooled or len(wanted.rows) != count:
            return PROMPT
        if count > self.sizes[-1]:
            return f"a batch has more than {self.sizes[-1]} sequences, the most that graphs were made for"
        if layout.max_blocks > self.buffers.width:
            return f"a sequence has more than {self.buffers.width} blocks, the most that graphs were made for"
        return None

    def forward(self, layout: StepLayout, last_tokens: Tensor | None) -> BatchInputs | str:
        """Compute a batch that :meth:`why_not` has nothing against; :meth:`hidden` has the result. Or say why it cannot be.

        Args:
            last_tokens: int64, what the preceding launch sampled, where ``layout.sources`` asks for it.
        """
        size = self._size(layout.num_sequences)
        graph = self._graph(Part.FORWARD, size)
        if graph is None:
            return self._broken[Part.FORWARD]
        buffers = self.buffers
        if layout.sources:
            assert last_tokens is not None, "a token is pending, but nothing was launched before"
            if last_tokens.data_ptr() != buffers.last_tokens.data_ptr():  # an eager step's
                if last_tokens.shape[0] > buffers.rows:
                    return f"a step sampled more than {buffers.rows} tokens, the most that graphs were made for"
                buffers.last_tokens[: last_tokens.shape[0]].copy_(last_tokens)
        buffers.fill(layout, size)
        graph.replay()
        self._counts.graph_replays += 1
        return buffers.batch(layout)

    def hidden(self, count: int) -> Tensor:
        """``[count, C]``, rows of the latest :meth:`forward`; overwritten by the next."""
        return self._hidden[:count]

    def choose(self, seqs: SequenceABC[Sequence]) -> Tensor | None:
        """The tokens of the rows that :meth:`forward` just computed; None if that cannot be replayed.

        They stand in the static buffer that the next batch reads them from.
        """
        size = self._size(len(seqs))
        part = Part.GREEDY if all(map(is_greedy, seqs)) else Part.SAMPLED
        graph = self._graph(part, size) if part in self._parts else None
        if graph is None:
            return None
        if part is Part.SAMPLED:
            self.buffers.fill_draws(draws_of(seqs))
        graph.replay()
        return self.buffers.last_tokens[: len(seqs)]

    def capture_all(self) -> None:
        """Record every size, the largest first, so that the others live in memory that it took already."""
        for size in reversed(self.sizes):
            for part in self._parts:
                self._graph(part, size)

    @property
    def broken(self) -> dict[str, str]:
        """Part -> why no further graph of it is recorded; empty while all is well."""
        return {part.value: reason for part, reason in self._broken.items()}

    def _size(self, count: int) -> int:
        size = size_for(count, self.sizes)
        assert size is not None, "why_not() comes first"
        return size

    def _graph(self, part: Part, size: int) -> Graph | None:
        graph = self._graphs.get((part, size))
        if graph is not None or part in self._broken:
            return graph
        if part is Part.SAMPLED and not samples_on_the_device(self._hidden.device):
            self._broken[part] = "what samples here looks at values on the host"
            return None
        cause = "on another rank"
        try:
            graph = self._capture(self._bodies[part], size)
        except Exception as error:  # out of memory, an op that waits, a driver that cannot: whatever stands in the way
            cause = f"{type(error).__name__}: {error!s:.300}"
        if self._is_whole(graph):
            assert graph is not None
            self._graphs[part, size] = graph
            self._counts.graph_captures += 1
            return graph
        self._broken[part] = f"the {part.value} of {size} rows could not be captured ({cause})"
        self._counts.warn(self._broken[part])
        return None

    def _is_whole(self, graph: Graph | None) -> bool:
        """Whether every rank has captured: a capture computes something first, which all do or none."""
        if self._parallel.size == 1:
            return graph is not None
        num_failed = torch.full((1,), float(graph is None), device=self._hidden.device)
        return self._parallel.all_reduce(num_failed).item() == 0.0

    def _capture(self, body: Callable[[int], None], size: int) -> Graph:
        # Between two launches nothing is lost by this: the part that reads a buffer runs after the trial of the part that writes
        # it, and a batch fills in its inputs when its graph is there.
        buffers = self.buffers
        buffers.pad(size, min(WARM_UP_LENGTH, buffers.width * self._cache.block_size))
        body(size)  # compiles and tunes kernels, makes workspaces: none of that can be recorded
        buffers.pad(size)
        if self._pool is None:
            self._pool = self._api.pool()
        with self._api.capture(self._pool) as graph:
            body(size)
        return graph

    def _forward(self, size: int) -> None:
        token_ids, positions, metadata = self.buffers.inputs(size)
        self._hidden[:size].copy_(self._module(token_ids, positions, self._cache.layers, metadata))

    def _greedy(self, size: int) -> None:
        self.buffers.last_tokens[:size].copy_(choose_greedy(self._module.compute_logits(self._hidden[:size])))

    def _sampled(self, size: int) -> None:
        logits = self._module.compute_logits(self._hidden[:size])
        self.buffers.last_tokens[:size].copy_(kernels.sample_rows(logits, self.buffers.draws.first(size)))
