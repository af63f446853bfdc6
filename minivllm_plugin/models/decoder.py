"""The pre-norm decoder that the architectures share: attention over the paged cache, gated MLP, layer, stack, head.

An architecture file says how its layer differs (:mod:`minivllm_plugin.models.qwen3` is an example). Called on the engine
thread only; all state of a pass comes in as arguments. Of several ranks each holds a part of every layer; which one, and how
to reach the others, is given to the layers when they are built.

Shapes: ``T`` new tokens of all sequences of the batch side by side, ``C`` hidden size, ``H`` query heads, ``K`` KV heads,
``D`` head size; of several ranks, ``H`` and ``K`` count this rank's heads.
"""

from collections.abc import Sequence

from torch import Tensor, nn

from minivllm_kernels import AttentionMetadata, attention, norm_rotary_store, silu_and_mul
from minivllm_plugin.models.config import ModelConfig
from minivllm_plugin.models.layers import RMSNorm, RotaryTable
from minivllm_plugin.models.parallel_layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from minivllm_plugin.parallel.context import SINGLE, ParallelContext

__all__ = ["Attention", "CausalLM", "Decoder", "DecoderLayer", "GatedMLP", "KVCache"]

KVCache = tuple[Tensor, Tensor]
"""Keys and values of one layer, each ``[num_blocks, block_size, K, D]``."""


class Attention(nn.Module):
    """Grouped-query attention with rotary positions: ``[T, C] -> [T, C]``; writes the new keys and values to the cache.

    Attributes:
        q_norm, k_norm: norms over ``D`` of each query and each key head before they are rotated; None in most architectures.
    """

    def __init__(self, config: ModelConfig, parallel: ParallelContext = SINGLE) -> None:
        super().__init__()
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        heads, kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.scale = config.head_dim**-0.5
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size, heads, kv_heads, config.head_dim, bias=config.qkv_bias, parallel=parallel
        )
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.sizes = tuple(count * self.head_dim for count in (self.num_heads, self.num_kv_heads, self.num_kv_heads))
        q_size = heads * self.head_dim
        self.o_proj = RowParallelLinear(q_size, config.hidden_size, bias=config.output_bias, parallel=parallel)

    def forward(self, x: Tensor, positions: Tensor, cos_sin: Tensor, kv_cache: KVCache, metadata: AttentionMetadata) -> Tensor:
        q, k, v = self.qkv_proj(x).split(self.sizes, dim=-1)
        q, k = self.prepare_heads(q.unflatten(-1, (self.num_heads, -1)), k.unflatten(-1, (self.num_kv_heads, -1)))
        k_cache, v_cache = kv_cache
        q_weight, k_weight, eps = None, None, 0.0
        if self.q_norm is not None and self.k_norm is not None:
            q_weight, k_weight, eps = self.q_norm.weight, self.k_norm.weight, self.q_norm.eps
        v = v.unflatten(-1, (self.num_kv_heads, -1))
        q = norm_rotary_store(q, k, v, positions, cos_sin, k_cache, v_cache, metadata.slot_mapping, q_weight, k_weight, eps)
        out: Tensor = self.o_proj(attention(q, k_cache, v_cache, metadata, self.scale).flatten(1))
        return out

    def prepare_heads(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What an architecture does to ``q [T, H, D]`` and ``k [T, K, D]`` before they are normed and rotated: here nothing."""
        return q, k


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``: ``[T, C] -> [T, C]``."""

    def __init__(self, config: ModelConfig, parallel: ParallelContext = SINGLE) -> None:
        super().__init__()
        hidden, columns, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        sections = {"gate_proj": columns, "up_proj": columns}
        self.gate_up_proj = MergedColumnParallelLinear(hidden, sections, bias=bias, parallel=parallel)
        self.down_proj = RowParallelLinear(columns, hidden, bias=bias, parallel=parallel)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out


class DecoderLayer(nn.Module):
    """Norm, attention, norm, MLP. The sum so far travels beside the branch, so that each norm adds it in one pass."""

    def __init__(self, config: ModelConfig, self_attn: Attention, mlp: nn.Module) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self_attn
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        positions: Tensor,
        cos_sin: Tensor,
        kv_cache: KVCache,
        metadata: AttentionMetadata,
    ) -> tuple[Tensor, Tensor]:
        """(branch ``[T, C]``, sum ``[T, C]`` before it) -> the same for the next layer; no sum before the first."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, positions, cos_sin, kv_cache, metadata)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Token ids to normed hidden states ``[T, C]``."""

    def __init__(self, config: ModelConfig, layers: Sequence[DecoderLayer], parallel: ParallelContext = SINGLE) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, parallel)
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.rotary = RotaryTable(config.rope, config.head_dim, config.max_position_embeddings)

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata) -> Tensor:
        x, residual = self.embed_tokens(input_ids), None
        for layer, kv_cache in zip(self.layers, kv_caches, strict=True):
            x, residual = layer(x, residual, positions, self.rotary.cos_sin, kv_cache, metadata)
        return self.norm(x) if residual is None else self.norm.add(x, residual)[0]


class CausalLM(nn.Module):
    """A decoder and its head. Subclasses build the layer; everything else is the same for all architectures here.

    Attributes:
        config: of the whole model, whichever part this rank holds.
        parallel: this rank, for :meth:`build_layer` to pass on.
    """

    def __init__(self, config: ModelConfig, parallel: ParallelContext = SINGLE) -> None:
        super().__init__()
        self.config = config
        self.parallel = parallel
        self.model = Decoder(config, [self.build_layer(config) for _ in range(config.num_layers)], parallel)
        self.lm_head = None if config.tie_word_embeddings else ParallelLMHead(config.hidden_size, config.vocab_size, parallel)

    def build_layer(self, config: ModelConfig) -> DecoderLayer:
        raise NotImplementedError

    def forward(self, input_ids: Tensor, positions: Tensor, kv_caches: Sequence[KVCache], metadata: AttentionMetadata) -> Tensor:
        """Hidden states after the final norm.

        Args:
            input_ids: int64 ``[T]``, the new tokens, sequence after sequence.
            positions: int64 ``[T]``, each token's index in its own sequence.
            kv_caches: one pair per layer; the slots of ``metadata.slot_mapping`` are written.
            metadata: geometry of the batch.

        Returns:
            ``[T, C]`` in the model's dtype, the same on every rank.
        """
        hidden: Tensor = self.model(input_ids, positions, kv_caches, metadata)
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """``hidden [S, C]`` (the rows that need a next token) -> float32 ``[S, vocab_size]``; ``[S, 0]`` on ranks above 0."""
        head = self.model.embed_tokens if self.lm_head is None else self.lm_head
        return head.logits(hidden).float()
