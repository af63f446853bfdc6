"""The pool is what measured memory leaves: the arithmetic by a probe that is told what to find, and that the largest batch is
really computed, writes nowhere and is as large as the scheduler's can be."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from graph_runs import PLAIN_TORCH, VOCABULARY, Pool, engine_of, graph_runner, make_prompts, serve, tiny_model
from recorded_graphs import RecordingGraphApi

from minivllm_plugin.config import EngineConfig
from minivllm_plugin.errors import ConfigError
from minivllm_plugin.models.loader import LoadedModel
from minivllm_plugin.runner.kv_cache import block_bytes
from minivllm_plugin.runner.memory import plan_memory
from minivllm_plugin.runner.model_runner import ModelRunner
from minivllm_plugin.runner.runner_settings import RunnerSettings
from minivllm_plugin.runner.trial_batches import decode_layout, largest_layout

MIB = 2**20


@dataclass
class Probe:
    """A device of 1000 bytes (or so many), of which these are free; each work takes the next of ``peaks``."""

    total_bytes: int = 1000
    free_bytes: int = 700
    peaks: list[int] = field(default_factory=lambda: [50, 20])
    computed: int = 0
    fails: bool = False

    def total(self) -> int:
        return self.total_bytes

    def free(self) -> int:
        return self.free_bytes

    def peak_of(self, work: Callable[[], None]) -> int:
        if self.fails:
            raise torch.OutOfMemoryError("out of memory")
        work()
        self.computed += 1
        return self.peaks[self.computed - 1]


def nothing() -> None:
    pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model("Llama", tmp_path_factory.mktemp("model"))


def test_what_is_left_is_the_pool() -> None:
    plan = plan_memory(Probe(), 0.9, nothing, nothing, "cuda:0")
    assert (plan.taken, plan.batch, plan.graphs, plan.kept_free) == (300, 50, 20, 100)
    assert plan.pool == 1000 - 300 - 50 - 20 - 100
    assert plan_memory(Probe(), 1.0, nothing, None, "cuda:0").pool == 650
    # Another program's memory counts as taken: the share is one of the device, not of what happens to be free.
    assert plan_memory(Probe(free_bytes=400), 0.9, nothing, nothing, "cuda:0").pool == 230


def test_no_room_is_refused_with_where_it_went() -> None:
    for probe, share in ((Probe(free_bytes=170), 0.9), (Probe(), 0.36), (Probe(peaks=[650, 0]), 0.9)):
        with pytest.raises(
            ConfigError, match=rf"gpu_memory_utilization={share} leaves no memory.*cuda:0.*weights.*lower max_num"
        ):
            plan_memory(probe, share, nothing, nothing, "cuda:0")
    with pytest.raises(
        ConfigError, match=r"largest batch does not fit the .* GiB that are free on cuda:0; lower max_num_batched"
    ):
        plan_memory(Probe(fails=True), 0.9, nothing, nothing, "cuda:0")


def runner_of(model: LoadedModel, config: EngineConfig, *, graphs: bool = True) -> ModelRunner:
    api = RecordingGraphApi() if graphs else None
    return ModelRunner(model, (), PLAIN_TORCH, settings=RunnerSettings.of(config), graph_api=api)


@pytest.mark.parametrize("kind", ["auto", "bfloat16", "fp8"])
@pytest.mark.parametrize("block_size", [8, 32])
def test_blocks_fill_what_was_measured(model: LoadedModel, kind: str, block_size: int) -> None:
    config = EngineConfig(block_size=block_size, kv_cache_dtype=kind, max_num_sequences=4, max_num_batched_tokens=40)
    runner = runner_of(model, config)
    each = block_bytes(model.config, block_size, runner.cache_kind)
    probe = Probe(10 * MIB, 9 * MIB, [MIB, MIB // 2])
    left = 10 * MIB - MIB - MIB - MIB // 2 - (10 * MIB - int(10 * MIB * 0.9))
    most = 4 * model.config.max_position_embeddings // block_size
    num_blocks = runner.plan_num_blocks(config, probe)
    assert num_blocks == min(left // each, most)
    assert probe.computed == 2
    cache = runner.allocate_kv_cache(num_blocks, block_size)
    assert cache.num_bytes == num_blocks * each <= left


def test_nobody_measures_for_a_pool_that_was_asked_for(model: LoadedModel) -> None:
    for asked, expected in (({"num_blocks": 7}, 7), ({"kv_cache_bytes": 1 << 20}, None)):
        config = EngineConfig(**asked)  # type: ignore[arg-type]  # a number
        probe = Probe()
        each = block_bytes(model.config, config.block_size, "float32")
        assert runner_of(model, config).plan_num_blocks(config, probe) == (expected or (1 << 20) // each)
        assert probe.computed == 0


def test_less_than_a_block_is_refused(model: LoadedModel) -> None:
    config = EngineConfig(max_num_batched_tokens=8)
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0.9 leaves 530 bytes.*one block of 16 tokens takes \d+"):
        runner_of(model, config).plan_num_blocks(config, Probe())


def test_the_trial_has_the_shape_of_the_largest_batch_and_writes_nothing(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[Any, ...]] = []
    forward, logits = type(model.module).forward, type(model.module).compute_logits

    def recording(self: Any, token_ids: Any, positions: Any, caches: Any, metadata: Any) -> Any:
        before = [tensor.clone() for pair in caches for tensor in pair]
        hidden = forward(self, token_ids, positions, caches, metadata)
        after = [tensor for pair in caches for tensor in pair]
        assert all(
            torch.equal(old, new) or bool((old.isnan() == new.isnan()).all()) for old, new in zip(before, after, strict=True)
        )
        assert (metadata.slot_mapping == -1).all()
        seen.append((tuple(token_ids.shape), metadata.query_lens, metadata.seq_lens))
        return hidden

    def counting(self: Any, hidden: Any) -> Any:
        seen.append(("logits", hidden.shape[0]))
        return logits(self, hidden)

    monkeypatch.setattr(type(model.module), "forward", recording)
    monkeypatch.setattr(type(model.module), "compute_logits", counting)
    config = EngineConfig(max_num_sequences=3, max_num_batched_tokens=50, max_model_len=20, block_size=8)
    runner_of(model, config).plan_num_blocks(config, Probe(10 * MIB, 9 * MIB))
    assert seen == [
        ((50,), (20, 20, 10), (20, 20, 10)),
        ("logits", 3),
        ((3,), (1, 1, 1), (20, 20, 20)),
        ("logits", 3),
    ]
    seen.clear()
    runner_of(model, config, graphs=False).plan_num_blocks(config, Probe(10 * MIB, 9 * MIB))
    assert len(seen) == 2


def test_trial_layouts_stay_in_the_one_block() -> None:
    layout = largest_layout(70, 9, 32, 8)
    assert (layout.query_lens, len(layout.positions), len(layout.wanted.rows)) == ((32, 32, 6), 70, 9)
    assert layout.positions[:3] == [0, 1, 2]
    assert layout.positions[-1] == 5
    assert [len(table) for table in layout.block_tables] == [4, 4, 1]
    decode = decode_layout(5, 17, 8)
    assert decode.is_decode
    assert decode.positions == [16] * 5
    assert {block for batch in (layout, decode) for table in batch.block_tables for block in table} == {0}
    assert {slot for batch in (layout, decode) for slot in batch.slots} == {-1}


def test_an_engine_on_a_measured_pool_answers(model: LoadedModel) -> None:
    """The trial leaves nothing behind: a warm prefix of it, a token, a count."""
    config = EngineConfig(max_num_sequences=3, max_num_batched_tokens=24, block_size=4)
    runner = runner_of(model, config)
    pool = runner.plan_num_blocks(config, Probe(10 * MIB, 9 * MIB))
    runner.allocate_kv_cache(pool, 4)
    assert runner.counts.eager_steps == {}
    answers = serve(engine_of(runner, Pool(pool, 4, 3, 24)), make_prompts(3))
    plain = graph_runner(model, Pool(max_num_sequences=3), None, cuda_graphs="off")
    assert answers == serve(engine_of(plain, Pool(max_num_sequences=3)), make_prompts(3))
    assert all(0 <= token < VOCABULARY for answer in answers for token in answer)
