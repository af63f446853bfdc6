"""Ranks that record and replay their decode steps: the same tokens as eagerly, captures in step, and no choice among them."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from graph_runs import Pool, engine_of, make_prompts, serve, tiny_model
from recorded_graphs import RecordedGraph, RecordingGraphApi
from simulated_world import recording, run_world
from tiny_models import load_directory

from minivllm_plugin import SamplingParams
from minivllm_plugin.parallel.context import ParallelContext
from minivllm_plugin.parallel.runner import TensorParallelRunner
from minivllm_plugin.parallel.worker import compute
from minivllm_plugin.runner.model_runner import ModelRunner
from minivllm_plugin.runner.runner_settings import RunnerSettings

POOL = Pool()
SIZE = 2
MIXED = [
    SamplingParams(temperature=0, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=3, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, repetition_penalty=1.3),
    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1),
]


class RankGraphApi(RecordingGraphApi):
    """One rank's."""

    @contextmanager
    def capture(self, pool: object) -> Iterator[RecordedGraph]:
        with recording(), super().capture(pool) as graph:
            yield graph


class Queues:
    """The further ranks, as rank 0 sees them, when they are threads."""

    def __init__(self) -> None:
        self.payloads: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def broadcast(self, payload: bytes) -> None:
        self.payloads.put(payload)

    def call_on_failure(self, function: Any) -> None:
        pass

    @contextmanager
    def explained(self) -> Iterator[None]:
        yield


def generate(directory: Path, apis: list[RecordingGraphApi | None], settings: RunnerSettings) -> list[list[int]]:
    """Completions of two ranks, each with its graph API, over requests that come and go."""
    ranks = Queues()

    def one(parallel: ParallelContext) -> list[list[int]]:
        model = load_directory(directory, dtype="float32", parallel=parallel)
        local = ModelRunner(model, (), settings=settings, graph_api=apis[parallel.rank])
        cache = local.allocate_kv_cache(POOL.num_blocks, POOL.block_size)
        local.capture_graphs()
        if parallel.rank:
            while (payload := ranks.payloads.get(timeout=60)) is not None:
                compute(local, payload)
            return []
        runner = TensorParallelRunner(local, ranks, None, cache)  # type: ignore[arg-type]  # of threads
        prompts = make_prompts(8)
        try:
            return serve(engine_of(runner, POOL), prompts, [MIXED[i % len(MIXED)] for i in range(len(prompts))])
        finally:
            ranks.payloads.put(None)

    return run_world(SIZE, one)[0]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    tiny_model("Qwen3", directory, num_key_value_heads=2)
    return directory


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    return generate(directory, [None, None], RunnerSettings(6, 24, cuda_graphs="off"))


@pytest.mark.parametrize("when", ["lazy", "full"])
def test_replays_give_the_same_tokens(directory: Path, expected: list[list[int]], when: Any) -> None:
    apis = [RankGraphApi() for _ in range(SIZE)]
    assert generate(directory, list(apis), RunnerSettings(6, 24, cuda_graphs=when)) == expected
    assert [len(api.graphs) for api in apis] == [len(apis[0].graphs)] * SIZE
    assert [api.num_replays for api in apis] == [apis[0].num_replays] * SIZE
    assert apis[0].num_replays > 10
    sizes = 4  # 1, 2, 4, 6: no second graph for the choice, which only rank 0 makes
    assert len(apis[0].graphs) <= sizes


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("fail_from", [0, 1])
def test_a_capture_that_fails_on_one_rank_is_none_on_all(
    directory: Path, expected: list[list[int]], rank: int, fail_from: int
) -> None:
    apis = [RankGraphApi(fail_from=fail_from if rank == place else None) for place in range(SIZE)]
    assert generate(directory, list(apis), RunnerSettings(6, 24)) == expected
    assert apis[0].num_replays == apis[1].num_replays
    assert (apis[0].num_replays > 0) == (fail_from > 0)
    assert sorted(len(api.graphs) for api in apis) == [fail_from, fail_from + 1]
