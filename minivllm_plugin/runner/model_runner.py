"""Runs batches through a model. Owns weights and KV tensors; asked by the engine, one batch at a time, on its thread.

Knows sequences only as token lists with a block table. A batch is launched and its tokens are waited for later: one copy to
the device and one wait a step. On a CPU the same code runs, and what is waited for is there already.

Three parts that a process can run apart from each other: a layout (plain numbers, :mod:`minivllm_plugin.runner.step_layout`), the
forward pass of it (:meth:`ModelRunner.forward`), and the choice of tokens (:meth:`ModelRunner.choose`).
"""

import logging
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

import minivllm_kernels as kernels
from minivllm_kernels import AttentionGeometry
from minivllm_kernels.dispatch import BackendTable, Choice, fitted, using
from minivllm_plugin.config import EngineConfig
from minivllm_plugin.engine.runner import RunnerAnswers
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.models.loader import LoadedModel
from minivllm_plugin.runner.decode_graphs import DecodeGraphs
from minivllm_plugin.runner.device_inputs import BatchInputs, InputBuffers
from minivllm_plugin.runner.device_sampler import choose, is_device_only
from minivllm_plugin.runner.explaining import explain_choices, explain_steps
from minivllm_plugin.runner.graphs import CudaGraphApi, GraphApi
from minivllm_plugin.runner.host_buffer import on_device
from minivllm_plugin.runner.kv_cache import CACHE_DTYPES, KVCache, plan_num_blocks
from minivllm_plugin.runner.memory import CudaMemory, MemoryProbe
from minivllm_plugin.runner.pending_tokens import PendingTokens, ResultBuffers
from minivllm_plugin.runner.rows import IGNORED
from minivllm_plugin.runner.runner_settings import RunnerSettings
from minivllm_plugin.runner.sampler import sample
from minivllm_plugin.runner.step_counts import GRAPHS_OFF, PROMPT, StepCounts
from minivllm_plugin.runner.step_layout import StepLayout, lay_out
from minivllm_plugin.runner.trial_batches import measure

if TYPE_CHECKING:
    from minivllm_plugin.extensions.logits_pipeline import LogitsPipeline

__all__ = ["ModelRunner"]

logger = logging.getLogger(__name__)


class ModelRunner:
    """A model with its KV cache.

    Args:
        model: weights on their device.
        end_token_ids: tokens that ``min_tokens`` holds back.
        backends: what runs the ops; None is the built-in backends.
        settings: bounds of the batches that will come. None knows none, and so records no graphs.
        graph_api: what records graphs; None is CUDA's on a CUDA device, and nothing elsewhere.

    Attributes:
        processors: the logits processors of plugins; None when there are none.
        counts: how many steps were replayed, and why others were not.
    """

    can_pool = True

    def __init__(
        self,
        model: LoadedModel,
        end_token_ids: Collection[int],
        backends: BackendTable | None = None,
        *,
        settings: RunnerSettings | None = None,
        graph_api: GraphApi | None = None,
    ) -> None:
        self.model = model
        self.settings = settings or RunnerSettings(cuda_graphs="off")
        self.processors: LogitsPipeline | None = None
        self.counts = StepCounts()
        self._given_backends = backends
        self._backends = backends
        self.device = next(model.module.parameters()).device
        self._end_token_ids = frozenset(end_token_ids)
        self._cache: KVCache | None = None
        self._graph_api = graph_api or (CudaGraphApi(self.device) if self.device.type == "cuda" else None)
        self._graphs: DecodeGraphs | None = None
        self._inputs = InputBuffers(self.device)
        self._results = ResultBuffers(self.device)
        self._last_tokens: Tensor | None = None  # int64 on the device: what the latest launch sampled
        self._last_rows: dict[Sequence, int] = {}  # and whose they are

    def allocate_kv_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Take the memory of the pool. The scheduler is built with the geometry of what this returns, nothing else.

        Raises:
            ConfigError: the memory cannot be had.
        """
        self._cache = self._graphs = None
        self._backends = self._fitted(block_size)
        try:
            dtype = CACHE_DTYPES[self.cache_kind]
            self._cache = KVCache.allocate(self.model.cache_config, num_blocks, block_size, dtype, self.device)
        except (RuntimeError, MemoryError) as error:
            raise ConfigError(
                f"no memory for num_blocks={num_blocks} KV blocks of {block_size} tokens on {self.device}; "
                "lower num_blocks or kv_cache_bytes"
            ) from error
        if self._graph_api is not None and self._has_graphs:
            positions = min(self.settings.max_model_len or self.model.config.max_position_embeddings, num_blocks * block_size)
            self._graphs = DecodeGraphs(
                self._graph_api,
                self.model.module,
                self._cache,
                max_rows=self.settings.max_num_sequences,
                max_blocks=-(-positions // block_size),
                counts=self.counts,
                parallel=self.model.parallel,
            )
        return self._cache

    def plan_num_blocks(self, config: EngineConfig, probe: MemoryProbe | None = None) -> int:
        """Blocks that this device has room for, or as many as ``config`` asks for. Before :meth:`allocate_kv_cache`.

        Args:
            probe: measures memory where nothing is asked for; None is CUDA's on a CUDA device, and elsewhere nothing is measured.

        Raises:
            ConfigError: there is no room, or less than is asked for.
        """
        if probe is None and self.device.type == "cuda":
            probe = CudaMemory(self.device)
        measured = None
        if probe is not None and config.num_blocks is None and config.kv_cache_bytes is None:
            dtype, backends = CACHE_DTYPES[self.cache_kind], self._fitted(config.block_size)
            with on_device(self.device):
                plan = measure(self.model, config, dtype, backends, probe, has_graphs=self._has_graphs)
            logger.info("memory of %s, %s", self.device, plan)
            measured = plan.pool
        return plan_num_blocks(config, self.model.cache_config, self.cache_kind, measured)

    @property
    def backends(self) -> BackendTable | None:
        """What runs the ops: whoever calls :meth:`forward` and :meth:`choose` does so inside ``using()`` of this."""
        return self._backends

    @property
    def cache_kind(self) -> str:
        """Name of the type that keys and values are stored in."""
        asked = self.settings.kv_cache_dtype
        return str(self.model.dtype).removeprefix("torch.") if asked == "auto" else asked

    def explain(self) -> dict[str, str]:
        """Op -> what computes it, and why nothing that is preferred does; ``cuda graphs`` -> how steps were launched."""
        sizes = self._graphs.sizes if self._graphs is not None else ()
        rows = explain_choices(self.choices())
        return {**rows, "cuda graphs": explain_steps(self.counts, self.settings.cuda_graphs, sizes)}

    def choices(self) -> list[Choice]:
        """Which backend computes each op."""
        backends, device = self._backends, self.device.type
        return kernels.explain(device) if backends is None else backends.explain(device)

    @property
    def _has_graphs(self) -> bool:
        return self._graph_api is not None and self.settings.cuda_graphs != "off"

    def _fitted(self, block_size: int) -> BackendTable:
        """The backends without those that cannot do this model and cache."""
        model, dtype = self.model, CACHE_DTYPES[self.cache_kind]
        num_heads = model.config.num_heads // model.parallel.size
        kv = model.cache_config
        geometry = AttentionGeometry(num_heads, kv.num_kv_heads, kv.head_dim, block_size, model.dtype, dtype)
        return fitted(geometry, self._given_backends)

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """With ``cuda_graphs="full"``, record the graphs of all batch sizes: a longer start, and no step that waits for it."""
        if self._graphs is not None and self.settings.cuda_graphs == "full":
            with on_device(self.device), using(self._backends):
                self._graphs.capture_all()

    def run(self, seqs: list[Sequence], is_prefill: bool) -> RunnerAnswers:
        """One token per sequence; see :class:`minivllm_plugin.engine.llm_engine.Runner`."""
        return self.launch(seqs, is_prefill).wait()

    def can_launch(self, seqs: list[Sequence]) -> bool:
        """Whether this batch can be launched before the tokens of the previous one are known to the host."""
        return all(is_device_only(seq, self.processors) for seq in seqs)

    @torch.inference_mode()
    def launch(self, seqs: list[Sequence], is_prefill: bool) -> PendingTokens:
        """Begin to compute a batch; as :meth:`run`, but the tokens are waited for later.

        A sequence with ``num_pending_tokens`` continues with the token that the preceding launch sampled for it. The result of
        one launch must be waited for before the next but one.
        """
        with on_device(self.device), using(self._backends):
            layout = self.lay_out(seqs)
            hidden, inputs = self.forward(layout)
            return self.choose(hidden, inputs, layout, seqs)

    def lay_out(self, seqs: list[Sequence]) -> StepLayout:
        """The batch in plain numbers."""
        assert self._cache is not None, "allocate_kv_cache() comes first"
        return lay_out(seqs, self._cache.block_size, self._last_rows)

    def forward(self, layout: StepLayout) -> tuple[Tensor, BatchInputs]:
        """Compute hidden states ``[T, C]``, and write keys and values, of a layout."""
        assert self._cache is not None, "allocate_kv_cache() comes first"
        reason: str | None
        if self._graphs is None:
            reason = GRAPHS_OFF if self.settings.cuda_graphs == "off" else f"there are none on {self.device.type}"
        else:
            reason = self._graphs.why_not(layout)
            if reason is None:
                replayed = self._graphs.forward(layout, self._last_tokens)
                if isinstance(replayed, BatchInputs):
                    return self._graphs.hidden(layout.num_sequences), replayed
                reason = replayed
        self.counts.eager(reason, expected=self._graphs is None or reason == PROMPT)
        inputs = self._inputs.upload(layout, self._cache.block_size, self._last_tokens)
        hidden: Tensor = self.model.module(inputs.token_ids, inputs.positions, self._cache.layers, inputs.metadata)
        return hidden, inputs

    def choose(self, hidden: Tensor, inputs: BatchInputs, layout: StepLayout, seqs: list[Sequence]) -> PendingTokens:
        """Take from hidden states what the sequences want: embeddings, scores of their prompts, next tokens."""
        wanted = layout.wanted
        self._remember(None, [])
        sampled = [seqs[index] for index in wanted.sampled]
        if sampled and len(wanted.rows) == len(sampled) and not wanted.pooled and self.can_launch(sampled):
            chosen = self._graphs.choose(sampled) if inputs.is_replayed and self._graphs is not None else None
            if chosen is None:
                chosen = choose(self._logits(hidden, inputs), sampled)
            self._remember(chosen, sampled)
            return self._results.receive(chosen, [IGNORED] * len(seqs), wanted.sampled)
        logits = self._logits(hidden, inputs) if wanted.rows else None
        states = hidden.index_select(0, inputs.pooled_rows) if wanted.pooled else None
        return PendingTokens(wanted.answers(logits, states, seqs, self._choose_on_the_host))

    def _logits(self, hidden: Tensor, inputs: BatchInputs) -> Tensor:
        return self.model.module.compute_logits(hidden.index_select(0, inputs.logit_rows))

    def _choose_on_the_host(self, logits: Tensor, seqs: list[Sequence]) -> list[int]:
        assert not any(seq.num_pending_tokens for seq in seqs), "can_launch() said that it needs the host's history"
        known = sample(logits, seqs, self._end_token_ids, self.processors)
        self._remember(torch.tensor(known, device=self.device), seqs)
        return known

    def _remember(self, chosen: Tensor | None, sampled: list[Sequence]) -> None:
        """What a launch before this one's tokens are known will continue with."""
        self._last_tokens = chosen
        self._last_rows = {seq: row for row, seq in enumerate(sampled)}
