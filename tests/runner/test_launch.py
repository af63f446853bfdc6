"""Launches ahead of their predecessor's tokens: the device continues with what it sampled, and the host learns of it later.

A driver without a scheduler keeps one launch in flight, as an engine with asynchronous scheduling does; tokens must be those of
an engine that waits for each. On a CPU the code is the same, and the copies are done at once.
"""

from typing import Any

import pytest
import torch
from graph_runs import (
    GREEDY,
    PLAIN_TORCH,
    VOCABULARY,
    Pool,
    engine_of,
    graph_runner,
    make_prompts,
    make_sequence,
    serve,
    tiny_model,
)
from recorded_graphs import RecordingGraphApi
from torch import Tensor

from minivllm_kernels import DrawTensors, reference
from minivllm_kernels.dispatch import BackendTable
from minivllm_plugin import SamplingParams
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.models.loader import LoadedModel
from minivllm_plugin.runner.model_runner import ModelRunner

LENGTH = 8
POOL = Pool(num_blocks=80, max_num_sequences=5)
DRAWN = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, seed=5, max_tokens=LENGTH, ignore_eos=True)


class OnTheDevice:
    """Draws without the host: by the greatest of the logits, each moved by noise that its row's number gives (Gumbel)."""

    argmax = staticmethod(reference.argmax)

    @staticmethod
    def sample(logits: Tensor, draws: Any) -> Tensor:
        return OnTheDevice.sample_rows(logits, DrawTensors.build(draws, logits.device))

    @staticmethod
    def sample_rows(logits: Tensor, draws: DrawTensors) -> Tensor:
        tokens = torch.arange(logits.shape[1])
        noise = torch.frac((draws.uniform.unsqueeze(1) + 1) * (tokens + 1) * 0.618034)
        moved = (
            logits + torch.where(draws.temperature > 0, draws.temperature, 0.0).unsqueeze(1) * -(-noise.clamp(1e-6).log()).log()
        )
        best = moved.argmax(dim=1)
        healthy = logits.gather(1, logits.argmax(dim=1, keepdim=True)).squeeze(1).isfinite()
        return torch.where(healthy, best, -1)


SAMPLING_THERE = BackendTable({"there": (OnTheDevice(), ("cpu",)), "reference": (reference, ("cpu",))})
TABLES = {"reference": PLAIN_TORCH, "sampling on the device": SAMPLING_THERE}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model("Qwen3", tmp_path_factory.mktemp("model"))


def sequences(params: list[SamplingParams]) -> list[Sequence]:
    prompts = make_prompts(len(params), seed=4)
    tables = [list(range(16 * i, 16 * i + 16))[::-1] for i in range(len(prompts))]
    return [make_sequence(prompt, table, wanted) for prompt, table, wanted in zip(prompts, tables, params, strict=True)]


def run_ahead(runner: ModelRunner, seqs: list[Sequence], leaves: dict[int, int] | None = None) -> list[list[int]]:
    """Every launch before the tokens of the one before it are fetched.

    Args:
        leaves: launch -> which sequence is not in it any more; the others go on.
    """
    flying: list[tuple[list[Sequence], Any]] = []
    live = list(seqs)
    for launch in range(LENGTH):
        if leaves and launch in leaves:
            live.remove(seqs[leaves[launch]])
        batch = list(live) if launch % 3 else live[::-1]
        assert runner.can_launch(batch)
        launch_one(runner, batch, launch == 0, flying)
    take(*flying.pop())
    return [seq.completion_token_ids for seq in seqs]


def launch_one(runner: ModelRunner, batch: list[Sequence], is_prefill: bool, flying: list[tuple[list[Sequence], Any]]) -> None:
    """As the engine does: the launch before this one is waited for once this one is under way."""
    pending = runner.launch(batch, is_prefill)
    for seq in batch:
        seq.num_computed_tokens += seq.num_scheduled_tokens
        seq.num_scheduled_tokens = 1
    if flying:
        take(*flying.pop())
    for seq in batch:
        seq.num_pending_tokens = 1
    flying.append((batch, pending))


def take(batch: list[Sequence], pending: Any) -> None:
    tokens = pending.wait()
    assert pending.wait() == tokens
    for seq, token in zip(batch, tokens, strict=True):
        seq.num_pending_tokens = 0
        seq.append_token(token)


def run_in_step(model: LoadedModel, params: list[SamplingParams], table: BackendTable = PLAIN_TORCH) -> list[list[int]]:
    """The same prompts through an engine that waits."""
    pool = Pool(num_blocks=80, max_num_sequences=5, max_num_batched_tokens=200)
    engine = engine_of(graph_runner(model, pool, None, table, cuda_graphs="off"), pool)
    added = [engine.add_prompt(prompt, wanted) for prompt, wanted in zip(make_prompts(len(params), seed=4), params, strict=True)]
    while not all(seq.is_finished for seq in added):
        engine.step()
    return [seq.completion_token_ids for seq in added]


MIXES = {
    "greedy": [GREEDY.replace(max_tokens=LENGTH)] * 4,
    "drawn": [DRAWN.replace(seed=seed) for seed in range(4)],
    "both": [GREEDY.replace(max_tokens=LENGTH), DRAWN, DRAWN.replace(min_p=0.05, top_p=1.0), GREEDY.replace(max_tokens=LENGTH)],
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("graphs", ["lazy", "off"])
@pytest.mark.parametrize("mix", MIXES)
def test_tokens_are_those_of_an_engine_that_waits(model: LoadedModel, mix: str, graphs: str, table: str) -> None:
    runner = graph_runner(model, POOL, RecordingGraphApi(), TABLES[table], cuda_graphs=graphs)
    answers = run_ahead(runner, sequences(MIXES[mix]))
    assert answers == run_in_step(model, MIXES[mix], TABLES[table])
    assert runner.counts.graph_replays == (LENGTH - 1 if graphs == "lazy" else 0)
    if graphs == "lazy":
        sampled = mix != "greedy" and table != "reference"
        assert runner.counts.graph_captures == (2 if mix == "greedy" or sampled else 1)


@pytest.mark.parametrize("graphs", ["lazy", "off"])
def test_one_that_leaves_while_a_launch_is_in_flight_disturbs_nobody(model: LoadedModel, graphs: str) -> None:
    """4 sequences, then 3, 2 and 1: with graphs, the last two sizes are recorded while tokens are pending."""
    expected = run_in_step(model, MIXES["both"])
    runner = graph_runner(model, POOL, RecordingGraphApi(), cuda_graphs=graphs)
    answers = run_ahead(runner, sequences(MIXES["both"]), {3: 1, 5: 0, 6: 3})
    assert answers == [expected[0][:5], expected[1][:3], expected[2], expected[3][:6]]
    assert runner.counts.graph_captures == (3 if graphs == "lazy" else 0)


@pytest.mark.parametrize("mix", ["greedy", "drawn"])
def test_a_choice_that_is_recorded_late_keeps_what_is_pending(model: LoadedModel, mix: str) -> None:
    expected = run_in_step(model, MIXES[mix], SAMPLING_THERE)
    runner = graph_runner(model, POOL, RecordingGraphApi(), SAMPLING_THERE)
    answers = run_ahead(runner, sequences(MIXES[mix]), {3: 1, 5: 0, 6: 3})
    assert answers == [expected[0][:5], expected[1][:3], expected[2], expected[3][:6]]
    assert runner.counts.graph_captures == 6


@pytest.mark.parametrize("graphs", ["lazy", "off"])
def test_a_newcomers_prompt_joins_those_whose_tokens_are_pending(model: LoadedModel, graphs: str) -> None:
    """Eager steps and replayed ones take pending tokens from each other."""
    params = [GREEDY.replace(max_tokens=LENGTH)] * 3
    expected = run_in_step(model, params)
    runner = graph_runner(model, POOL, RecordingGraphApi(), cuda_graphs=graphs)
    first, second, third = sequences(params)
    joins = {0: first, 2: second, 5: third}
    live: list[Sequence] = []
    flying: list[tuple[list[Sequence], Any]] = []
    for launch in range(8):
        if launch in joins:
            live.append(joins[launch])
        batch = list(live)
        launch_one(runner, batch, launch in joins, flying)
    take(*flying.pop())
    assert [seq.completion_token_ids for seq in (first, second, third)] == [expected[0], expected[1][:6], expected[2][:3]]


@pytest.mark.parametrize("graphs", ["lazy", "off"])
def test_a_row_that_fails_is_told_and_computed_on_without_harm(model: LoadedModel, graphs: str) -> None:
    """NaN in one sequence's own blocks: FAILED_TOKEN for it, and in the launch that follows; nothing for the others."""
    params = [GREEDY.replace(max_tokens=LENGTH)] * 3
    expected = run_in_step(model, params)
    runner = graph_runner(model, POOL, RecordingGraphApi(), cuda_graphs=graphs)
    seqs = sequences(params)
    first_tokens: Any = runner.run(seqs, True)
    for seq, token in zip(seqs, first_tokens, strict=True):
        seq.append_token(token)
        seq.num_computed_tokens, seq.num_scheduled_tokens = len(seq) - 1, 1
    assert runner._cache is not None
    for keys, values in runner._cache.layers:
        keys[seqs[1].block_table[0]] = torch.nan
        values[seqs[1].block_table[0]] = torch.nan
    first = runner.launch(seqs, False)
    for seq in seqs:
        seq.num_computed_tokens += 1
        seq.num_pending_tokens = 1
    second = runner.launch(seqs, False)
    assert first.wait() == [expected[0][1], FAILED_TOKEN, expected[2][1]]
    assert second.wait() == [expected[0][2], FAILED_TOKEN, expected[2][2]]


@pytest.mark.parametrize("num_blocks", [64, 13])
def test_an_engine_that_overlaps_its_steps_says_the_same(model: LoadedModel, num_blocks: int) -> None:
    """Joins, leaves, warm prefixes, pieces, preemption in the small pool; one request needs the host at every token."""
    pool, prompts = Pool(num_blocks=num_blocks), make_prompts(7)
    params = [
        GREEDY,
        DRAWN,
        GREEDY.replace(max_tokens=3),
        DRAWN.replace(seed=8),
        GREEDY,
        GREEDY.replace(repetition_penalty=1.4),
        DRAWN,
    ]
    expected = serve(engine_of(graph_runner(model, pool, None, cuda_graphs="off"), pool), prompts, params)
    runner = graph_runner(model, pool, RecordingGraphApi())
    engine = engine_of(runner, pool, asynchronous=True)
    assert serve(engine, prompts, params) == expected
    assert runner.counts.graph_replays
    assert (engine.scheduler.num_preemptions > 0) == (num_blocks == 13)


def test_what_needs_the_host_is_not_launched_ahead(model: LoadedModel) -> None:
    runner = graph_runner(model, POOL, RecordingGraphApi())
    plain = make_sequence([1, 2, 3], [0])
    assert runner.can_launch([plain])
    for changes in (
        {"presence_penalty": 0.5},
        {"logit_bias": {5: 1.0}},
        {"min_tokens": 2},
        {"bad_words_token_ids": ((5,),)},
        {"allowed_token_ids": [5, 6]},
        {"logprobs": 1},
        {"prompt_logprobs": 0},
    ):
        asking = make_sequence([1, 2, 3], [1], GREEDY.replace(**changes))
        assert not runner.can_launch([plain, asking]), changes
        [token] = runner.run([asking], True)
        assert token in range(VOCABULARY)
    assert not runner.can_launch([Sequence([1, 2], pooling="last")])


def test_one_that_asks_for_more_shares_a_graph_with_the_others(model: LoadedModel) -> None:
    """Penalties and log-probabilities go through the host, behind the same replayed forward pass."""
    params = [
        GREEDY.replace(max_tokens=LENGTH),
        GREEDY.replace(max_tokens=LENGTH, repetition_penalty=1.3, logprobs=2),
        DRAWN,
    ]
    pool = Pool(num_blocks=80, max_num_sequences=5, max_num_batched_tokens=200)
    runner = graph_runner(model, pool, RecordingGraphApi())
    engine = engine_of(runner, pool)
    added = [engine.add_prompt(prompt, wanted) for prompt, wanted in zip(make_prompts(3, seed=4), params, strict=True)]
    while not all(seq.is_finished for seq in added):
        engine.step()
    assert [seq.completion_token_ids for seq in added] == run_in_step(model, params)
    assert [len(seq.logprobs) for seq in added] == [0, LENGTH, 0]
    assert runner.counts.graph_replays == LENGTH - 1
    assert runner.counts.graph_captures == 1  # no choice was captured
