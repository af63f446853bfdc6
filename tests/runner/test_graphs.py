"""Decode steps by recorded graphs: the tokens are those of eager steps, whatever comes, goes or is computed again.

The graphs are recorded by a fake on CPU tensors (tests/support/recorded_graphs.py) that bakes in every number of the host and
refuses what a device refuses; the cache starts as NaN. Trials J01 and J05.
"""

import logging
from typing import Any

import pytest
from graph_runs import GREEDY, Pool, engine_of, graph_runner, make_prompts, make_sequence, serve, tiny_model
from recorded_graphs import CaptureRefusedError, RecordingGraphApi
from torch import Tensor

from minivllm_kernels import reference
from minivllm_kernels.dispatch import BackendTable
from minivllm_plugin import SamplingParams
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.models.loader import LoadedModel
from minivllm_plugin.runner.graphs import graph_sizes, size_for
from minivllm_plugin.runner.step_counts import PROMPT

FAMILIES = ("Llama", "Qwen3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    return {family: tiny_model(family, tmp_path_factory.mktemp("model")) for family in FAMILIES}


@pytest.fixture
def llama(models: dict[str, LoadedModel]) -> LoadedModel:
    return models["Llama"]


@pytest.fixture
def qwen3(models: dict[str, LoadedModel]) -> LoadedModel:
    return models["Qwen3"]


# --- sizes ---------------------------------------------------------------------------------------------------------------


def test_every_batch_has_the_smallest_size_that_holds_it() -> None:
    for largest in (*range(1, 70), 100, 128, 250, 256, 512, 1000):
        check_sizes(largest)


def check_sizes(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == largest
    for batch in range(1, largest + 1):
        size = size_for(batch, sizes)
        assert size == min(other for other in sizes if other >= batch)
        assert size is not None
        assert size < 2 * batch + 8  # padding stays in bounds
    assert size_for(largest + 1, sizes) is None


def test_sizes_are_few() -> None:
    assert graph_sizes(6) == (1, 2, 4, 6)
    assert graph_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert len(graph_sizes(256)) <= 20
    assert len(graph_sizes(1024)) <= 32


# --- the same tokens -----------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[Pool, dict[str, Any]]] = {
    "roomy": (Pool(), {}),
    "tiny pool": (Pool(num_blocks=13), {}),
    "small pieces": (Pool(max_num_batched_tokens=7), {}),
    "no pieces": (Pool(max_num_batched_tokens=64), {"enable_chunked_prefill": False}),
    "blocks of 8": (Pool(num_blocks=32, block_size=8), {}),
    "blocks of 32": (Pool(num_blocks=12, block_size=32), {}),
    "no cache": (Pool(), {"enable_prefix_caching": False}),
}


@pytest.mark.parametrize(("family", "way"), [(family, way) for family in FAMILIES for way in WAYS])
def test_replayed_tokens_are_the_eager_ones(models: dict[str, LoadedModel], family: str, way: str) -> None:
    model = models[family]
    pool, options = WAYS[way]
    prompts = make_prompts(7)
    api = RecordingGraphApi()
    runner = graph_runner(model, pool, api)
    engine = engine_of(runner, pool, **options)
    answers = serve(engine, prompts)
    eager = engine_of(graph_runner(model, pool, None, cuda_graphs="off"), pool, **options)
    assert answers == serve(eager, prompts)
    assert len({tuple(answer) for answer in answers}) > 5
    snapshot = engine.scheduler.block_manager.statistics
    assert (engine.scheduler.num_preemptions > 0) == (way == "tiny pool")
    assert (snapshot.hit_tokens > 0) == (way not in ("no cache", "blocks of 32"))
    assert runner.counts.graph_replays > 4
    assert api.num_replays >= 2 * runner.counts.graph_replays  # forward and choice
    assert set(runner.counts.eager_steps) == {PROMPT}
    assert api.pools == 1


def test_a_step_without_prompts_is_replayed_and_one_with_them_is_not(llama: LoadedModel) -> None:
    pool = Pool()
    runner = graph_runner(llama, pool, RecordingGraphApi())
    engine = engine_of(runner, pool)
    engine.add_prompt([5, 6, 7], GREEDY)
    expected = {"eager": 0, "replayed": 0}
    for step in range(8):
        if step == 4:
            engine.add_prompt([9, 8, 7, 6], GREEDY)
        output = engine.step()
        expected["eager" if output.is_prefill else "replayed"] += 1
        assert (runner.counts.eager_steps.get(PROMPT, 0), runner.counts.graph_replays) == tuple(expected.values())
    assert expected == {"eager": 2, "replayed": 6}


def test_a_piece_of_one_prompt_token_is_no_decode(llama: LoadedModel) -> None:
    """One row a sequence, but not one token: beside a decoding sequence, the third token of a prompt of five."""
    runner = graph_runner(llama, Pool(), RecordingGraphApi())
    decoding, prompt = make_sequence([5, 6, 7], [3]), make_sequence([8, 9, 10, 11, 12], [5, 1])
    prompt.num_scheduled_tokens = 2
    first = runner.run([decoding, prompt], True)
    advance([decoding], first[:1])
    prompt.num_computed_tokens, prompt.num_scheduled_tokens = 2, 1
    assert runner.run([decoding, prompt], True)[0] == alone(llama, decoding)
    prompt.num_computed_tokens, prompt.num_scheduled_tokens = 3, 2
    assert runner.run([prompt], True) == [alone(llama, make_sequence([8, 9, 10, 11, 12], [0]))]
    assert (runner.counts.eager_steps, runner.counts.graph_replays) == ({PROMPT: 3}, 0)


def test_full_capture_comes_first_and_largest_first(llama: LoadedModel) -> None:
    pool, api = Pool(), RecordingGraphApi()
    runner = graph_runner(llama, pool, api, cuda_graphs="full")
    runner.capture_graphs()
    captured = len(api.graphs)
    assert captured == runner.counts.graph_captures == 2 * len(graph_sizes(pool.max_num_sequences))
    widths = [graph.calls[-1].args[0].shape[0] for graph in api.graphs]  # the last op writes the rows of that size
    assert widths == sorted(widths, reverse=True)
    prompts = make_prompts(7)
    answers = serve(engine_of(runner, pool), prompts)
    assert len(api.graphs) == captured
    assert answers == serve(engine_of(graph_runner(llama, pool, None, cuda_graphs="off"), pool), prompts)


def test_lazy_capture_records_what_is_met_and_once(llama: LoadedModel) -> None:
    pool, api = Pool(), RecordingGraphApi()
    runner = graph_runner(llama, pool, api)
    runner.capture_graphs()
    assert api.graphs == []
    engine = engine_of(runner, pool)
    engine.generate([[3, 4, 5]] * 3, GREEDY)
    assert len(api.graphs) == 2  # forward and choice of 4 rows, for batches of 3
    engine.generate([[6, 7, 8]] * 4, GREEDY)
    assert len(api.graphs) == 2


def test_buffers_never_move(qwen3: LoadedModel) -> None:
    pool = Pool(num_blocks=16)
    runner = graph_runner(qwen3, pool, RecordingGraphApi())
    graphs = runner._graphs
    assert graphs is not None
    before = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in graphs.tensors.items()}
    assert {"token_ids", "positions", "slots", "lengths", "block_tables", "last_tokens", "hidden"} <= set(before)
    engine = engine_of(runner, pool)
    serve(engine, make_prompts(9))
    serve(engine, make_prompts(5, seed=1), SamplingParams(temperature=0.8, seed=3, max_tokens=5, ignore_eos=True))
    assert {name: (tensor.data_ptr(), tensor.shape) for name, tensor in graphs.tensors.items()} == before


# --- J01: padding --------------------------------------------------------------------------------------------------------


def test_a_shrinking_batch_writes_to_its_own_slots_alone(qwen3: LoadedModel) -> None:
    """Batches of 4, 3, 1 and 2 sequences in a graph of 4 rows: nothing changes in the cache but the slots of the live rows."""
    pool = Pool(max_num_sequences=4)
    runner = graph_runner(qwen3, pool, RecordingGraphApi())
    graphs = runner._graphs
    assert graphs is not None
    graphs.sizes = (4,)
    seqs = [make_sequence([10 + i, 20 + i, 30 + i], [7 * i + 2, 7 * i + 5]) for i in range(4)]
    advance(seqs, runner.run(seqs, True))
    cache = runner._cache
    assert cache is not None
    for live in (seqs, seqs[1:], seqs[2:3], [seqs[3], seqs[0]]):
        before = [tensor.clone() for pair in cache.layers for tensor in pair]
        slots = {seq.block_table[len(seq) - 1 >> 2] * 4 + (len(seq) - 1) % 4 for seq in live}
        tokens = runner.run(live, False)
        assert tokens == [alone(qwen3, seq) for seq in live]
        for old, new in zip(before, (tensor for pair in cache.layers for tensor in pair), strict=True):
            assert changed_slots(old, new) == slots
        advance(live, tokens)
    assert runner.counts.graph_replays == 4
    assert runner.counts.graph_captures == 2


def advance(seqs: list[Sequence], tokens: Any) -> None:
    for seq, token in zip(seqs, tokens, strict=True):
        seq.num_computed_tokens += seq.num_scheduled_tokens
        seq.append_token(token)
        seq.num_scheduled_tokens = 1


def alone(model: LoadedModel, seq: Sequence) -> Any:
    """The greedy token after all of ``seq``, computed anew."""
    runner = graph_runner(model, Pool(), None, cuda_graphs="off")
    return runner.run([make_sequence(list(seq.token_ids), list(range(20)))], True)[0]


def changed_slots(old: Tensor, new: Tensor) -> set[int]:
    same = (old == new) | (old.isnan() & new.isnan())
    return set((~same.flatten(2).all(2)).flatten().nonzero().flatten().tolist())


# --- what stands in the way is said --------------------------------------------------------------------------------------


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("fail_from", [0, 1, 2])
def test_a_failing_capture_falls_back_and_is_said_once(
    llama: LoadedModel, fail_from: int, caplog: pytest.LogCaptureFixture
) -> None:
    pool, prompts = Pool(), make_prompts(5)
    runner = graph_runner(llama, pool, RecordingGraphApi(fail_from=fail_from))
    answers = serve(engine_of(runner, pool), prompts)
    assert answers == serve(engine_of(graph_runner(llama, pool, None, cuda_graphs="off"), pool), prompts)
    lines = warnings_of(caplog)
    assert 1 <= len(lines) <= 2
    assert all("could not be captured (RuntimeError: out of graph memory)" in line for line in lines)
    assert (runner.counts.graph_replays > 0) == (fail_from > 0)
    reasons = [reason for reason in runner.counts.eager_steps if reason != PROMPT]
    assert all("out of graph memory" in reason for reason in reasons)
    assert bool(reasons) == any("forward pass" in line for line in lines)


def test_an_op_that_waits_for_the_device_is_refused_by_the_capture(llama: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    """As on a device: the capture fails, the step does not."""

    class Waiting:
        @staticmethod
        def silu_and_mul(gate_up: Tensor) -> Tensor:
            gate_up.sum().item()
            return reference.silu_and_mul(gate_up)

    table = BackendTable({"waiting": (Waiting(), ("cpu",)), "reference": (reference, ("cpu",))})
    pool, prompts = Pool(), make_prompts(4)
    runner = graph_runner(llama, pool, RecordingGraphApi(), table)
    assert serve(engine_of(runner, pool), prompts) == serve(
        engine_of(graph_runner(llama, pool, None, cuda_graphs="off"), pool), prompts
    )
    [line] = warnings_of(caplog)
    assert CaptureRefusedError.__name__ in line
    assert "item waits for the device" in line
    assert runner.counts.graph_replays == 0


def test_batches_that_no_graph_holds_run_eagerly_and_are_said(llama: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool(max_num_sequences=4)
    prompts = make_prompts(6)
    expected = serve(engine_of(graph_runner(llama, pool, None, cuda_graphs="off"), pool), prompts)
    few = graph_runner(llama, pool, RecordingGraphApi(), max_num_sequences=2)
    assert serve(engine_of(few, pool), prompts) == expected
    short = graph_runner(llama, pool, RecordingGraphApi(), max_model_len=16)
    assert serve(engine_of(short, pool), prompts) == expected
    lines = warnings_of(caplog)
    assert len(lines) == 2
    assert "a batch has more than 2 sequences" in lines[0]
    assert "a sequence has more than 4 blocks" in lines[1]
    for runner in (few, short):
        assert runner.counts.graph_replays
        assert len(runner.counts.eager_steps) == 2


def test_no_graphs_where_none_are_asked_for(llama: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    api = RecordingGraphApi()
    runner = graph_runner(llama, Pool(), api, cuda_graphs="off")
    serve(engine_of(runner, Pool()), make_prompts(3))
    assert api.graphs == []
    assert list(runner.counts.eager_steps) == ["graphs are switched off"]
    assert warnings_of(caplog) == []


def test_geometry_has_one_source(llama: LoadedModel) -> None:  # J05
    for block_size in (8, 32):
        pool = Pool(num_blocks=9, block_size=block_size)
        runner = graph_runner(llama, pool, RecordingGraphApi())
        cache, graphs = runner._cache, runner._graphs
        assert cache is not None
        assert graphs is not None
        engine = engine_of(runner, pool)
        assert engine.scheduler.block_size == cache.block_size == block_size
        assert engine.scheduler.block_manager.num_blocks == cache.num_blocks == 9
        assert {tensor.shape[:2] for pair in cache.layers for tensor in pair} == {(9, block_size)}
        assert graphs.tensors["block_tables"].shape == (pool.max_num_sequences, 9)  # the pool bounds every sequence
        _, _, metadata = graphs.buffers.inputs(2)
        assert (metadata.block_size, metadata.max_seq_len) == (block_size, 9 * block_size)


def test_graphs_go_with_their_cache(llama: LoadedModel) -> None:
    """They hold the addresses of its tensors."""
    runner = graph_runner(llama, Pool(), RecordingGraphApi())
    first = serve(engine_of(runner, Pool()), make_prompts(3))
    runner.allocate_kv_cache(32, 8)
    assert serve(engine_of(runner, Pool(num_blocks=32, block_size=8)), make_prompts(3)) == first
