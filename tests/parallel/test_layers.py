"""Every rank's part of a layer, put together, is the layer: all ranks in one process, over odd sizes."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from simulated_world import run_world
from torch import Tensor, nn

from minivllm_plugin.models.checkpoint import TensorTable, fill_parameters
from minivllm_plugin.models.layers import Linear, RMSNorm, parameter_sources
from minivllm_plugin.models.parallel_layers import (
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from minivllm_plugin.parallel.context import SINGLE, ParallelContext
from minivllm_plugin.parallel.partition import kv_head_share

TOLERANCE = {"atol": 1e-5, "rtol": 1e-5}


class Holder(nn.Module):
    """A layer where a model would have it, so that its tensors have the names that they have in checkpoints."""

    def __init__(self, name: str, layer: nn.Module) -> None:
        super().__init__()
        self.add_module(name, layer)


def checkpoint_for(module: nn.Module, *, merged: bool = False) -> TensorTable:
    """Random tensors for a whole module: one a section, or one a merged layer."""
    generator = torch.Generator().manual_seed(3)
    tensors: dict[str, Tensor] = {}
    for source in parameter_sources(module):
        for part in source.whole[:1] if merged or not source.parts else source.parts:
            tensors[part.tensor] = torch.randn(part.shape, generator=generator)
    return TensorTable(Path("nowhere"), tensors, "a test")


def filled(name: str, layer: nn.Module, checkpoint: TensorTable) -> nn.Module:
    holder = Holder(name, layer)
    fill_parameters(holder, checkpoint, dtype=torch.float32, device=torch.device("cpu"), tied=False, report=False)
    return layer


def both(
    name: str, build: Callable[[ParallelContext], nn.Module], size: int, x: Tensor, *, merged: bool = False
) -> tuple[nn.Module, list[nn.Module], Tensor, list[Tensor]]:
    """The whole layer and each rank's part, and what they make of ``x``."""
    checkpoint = checkpoint_for(Holder(name, build(SINGLE)), merged=merged)
    whole = filled(name, build(SINGLE), checkpoint)

    def one(parallel: ParallelContext) -> tuple[nn.Module, Tensor]:
        layer = filled(name, build(parallel), checkpoint)
        return layer, layer(x)

    parts = run_world(size, one)
    return whole, [layer for layer, _ in parts], whole(x), [out for _, out in parts]


@pytest.mark.parametrize("merged", [False, True], ids=["section by section", "as one tensor"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("size", "gate", "up"), [(1, 5, 3), (2, 6, 2), (3, 9, 3), (5, 15, 35)])
def test_merged_columns(size: int, gate: int, up: int, bias: bool, merged: bool) -> None:
    x = torch.randn(7, 11)

    def build(parallel: ParallelContext) -> nn.Module:
        return MergedColumnParallelLinear(11, {"gate_proj": gate, "up_proj": up}, bias=bias, parallel=parallel)

    _, _, expected, outs = both("gate_up_proj", build, size, x, merged=merged)
    gates, ups = zip(*(out.split((gate // size, up // size), dim=1) for out in outs), strict=True)
    torch.testing.assert_close(torch.cat((*gates, *ups), dim=1), expected, **TOLERANCE)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("size", "inputs", "outputs"), [(1, 7, 5), (2, 6, 5), (3, 9, 1), (7, 21, 13)])
def test_rows_add_up_with_the_bias_once(size: int, inputs: int, outputs: int, bias: bool) -> None:
    x = torch.randn(4, inputs)

    def build(parallel: ParallelContext) -> nn.Module:
        return RowParallelLinear(inputs, outputs, bias=bias, parallel=parallel)

    checkpoint = checkpoint_for(Holder("o_proj", build(SINGLE)))
    expected = filled("o_proj", build(SINGLE), checkpoint)(x)
    part = inputs // size

    def one(parallel: ParallelContext) -> Tensor:
        start = parallel.rank * part
        out: Tensor = filled("o_proj", build(parallel), checkpoint)(x[:, start : start + part].contiguous())
        return out

    for out in run_world(size, one):
        torch.testing.assert_close(out, expected, **TOLERANCE)


HEADS = [
    (heads, kv_heads, size)
    for heads, kv_heads, size in itertools.product((1, 2, 3, 4, 6, 8, 9, 12), (1, 2, 3, 4), (1, 2, 3, 4, 6))
    if heads % kv_heads == 0 and heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)
]


@pytest.mark.parametrize("merged", [False, True], ids=["section by section", "as one tensor"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), HEADS)
def test_every_query_head_meets_its_own_kv_head(heads: int, kv_heads: int, size: int, merged: bool) -> None:
    head_dim = 2
    x = torch.randn(3, 5)

    def build(parallel: ParallelContext) -> nn.Module:
        return QKVParallelLinear(5, heads, kv_heads, head_dim, bias=True, parallel=parallel)

    _, layers, expected, outs = both("qkv_proj", build, size, x, merged=merged)
    q, k, v = (
        part.unflatten(1, (-1, head_dim))
        for part in expected.split((heads * head_dim, kv_heads * head_dim, kv_heads * head_dim), dim=1)
    )
    seen = 0
    for layer, out in zip(layers, outs, strict=True):
        assert isinstance(layer, QKVParallelLinear)
        mine, mine_kv = layer.num_heads, layer.num_kv_heads
        my_q, my_k, my_v = (
            part.unflatten(1, (-1, head_dim)) for part in out.split([head_dim * n for n in (mine, mine_kv, mine_kv)], 1)
        )
        for head in range(mine):
            kv_head, my_kv_head = (seen + head) // (heads // kv_heads), head // (mine // mine_kv)
            torch.testing.assert_close(my_q[:, head], q[:, seen + head], **TOLERANCE)
            torch.testing.assert_close(my_k[:, my_kv_head], k[:, kv_head], **TOLERANCE)
            torch.testing.assert_close(my_v[:, my_kv_head], v[:, kv_head], **TOLERANCE)
        seen += mine
    assert seen == heads


@pytest.mark.parametrize(("vocab_size", "size"), [(1, 1), (1, 3), (5, 2), (5, 4), (7, 3), (96, 4), (97, 4)])
def test_a_vocabulary_of_any_size(vocab_size: int, size: int) -> None:
    """The embedding, and the same weight as a head, and a head of its own; what pads the last ranks is seen by nobody."""
    tokens = torch.randint(0, vocab_size, (9,))

    def embedding(parallel: ParallelContext) -> nn.Module:
        return VocabParallelEmbedding(vocab_size, 6, parallel)

    whole, layers, expected, outs = both("embed_tokens", embedding, size, tokens)
    assert all(torch.equal(out, expected) for out in outs)
    assert isinstance(whole, VocabParallelEmbedding)
    hidden = torch.randn(4, 6)
    rows = sum(layer.weight.shape[0] for layer in layers)
    assert rows == -(-vocab_size // size) * size
    assert torch.cat([layer.weight for layer in layers])[vocab_size:].count_nonzero() == 0

    def head(parallel: ParallelContext) -> nn.Module:
        return ParallelLMHead(6, vocab_size, parallel)

    _, _, expected, outs = both("lm_head", head, size, -hidden.abs())
    assert [out.shape[1] for out in outs] == [vocab_size] + [0] * (size - 1)
    torch.testing.assert_close(outs[0], expected, **TOLERANCE)


def test_padding_never_wins() -> None:
    """All logits below 0, which is what a padded row gives."""

    def one(parallel: ParallelContext) -> Tensor:
        head = ParallelLMHead(2, 5, parallel)
        fill_parameters(Holder("lm_head", head), table, dtype=torch.float32, device=torch.device("cpu"), tied=False, report=False)
        return head(torch.ones(1, 2))

    table = TensorTable(Path("nowhere"), {"lm_head.weight": -torch.arange(1.0, 11.0).view(5, 2)}, "a test")
    logits = run_world(4, one)[0]
    assert logits.shape == (1, 5)
    assert logits.argmax() == 0


def test_ranks_hold_no_more_than_their_part() -> None:
    def build(parallel: ParallelContext) -> int:
        with torch.device("meta"):
            qkv = QKVParallelLinear(64, 8, 4, 16, parallel=parallel)
            rows = RowParallelLinear(128, 64, parallel=parallel)
        return sum(parameter.numel() for layer in (qkv, rows) for parameter in layer.parameters())

    [whole] = run_world(1, build)
    assert run_world(4, build) == [whole // 4] * 4


@pytest.mark.parametrize(
    ("kv_heads", "size", "expected"), [(4, 2, [(0, 2), (2, 4)]), (1, 3, [(0, 1)] * 3), (2, 4, [(0, 1)] * 2 + [(1, 2)] * 2)]
)
def test_kv_heads_are_shared_out_or_repeated(kv_heads: int, size: int, expected: list[tuple[int, int]]) -> None:
    assert [kv_head_share(kv_heads, rank, size) for rank in range(size)] == expected


def test_other_layers_are_whole_everywhere() -> None:
    holder = Holder("norm", RMSNorm(4, 1e-6))
    holder.add_module("up_proj", Linear(4, 3, bias=True))
    slices = [part for source in parameter_sources(holder) for part in source.whole]
    assert {part.tensor: part.shape for part in slices} == {
        "norm.weight": (4,),
        "up_proj.weight": (3, 4),
        "up_proj.bias": (3,),
    }
    assert all(part.is_whole for part in slices)


def test_one_rank_asks_nobody() -> None:
    x = torch.randn(2)
    assert SINGLE.all_reduce(x) is x
    assert SINGLE.gather(x) == [x]
