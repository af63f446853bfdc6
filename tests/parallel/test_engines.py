"""Engines of several processes give what an engine of one gives: two of them side by side, a Qwen3 and a Llama."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rank_processes import is_gone, rank_processes
from settled import settled_snapshot
from tiny_checkpoints import tiny_checkpoint
from waiting import wait_until

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.serving.outputs import RequestOutput

FAMILIES = ("Qwen3", "Llama")
PROMPTS = [[5, 9, 11, 3, 60], [7], list(range(3, 40)), [12, 13, 14, 15]]
OPTIONS: dict[str, Any] = {"dtype": "float32", "num_blocks": 40, "block_size": 4, "max_num_batched_tokens": 24}
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=8, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, seed=4, max_tokens=5, ignore_eos=True),
    "scored": SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=3, prompt_logprobs=2),
    "adjusted": SamplingParams(
        temperature=0, max_tokens=5, repetition_penalty=1.5, presence_penalty=0.5, logit_bias={4: 2.0}, min_tokens=5
    ),
    "masked": SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, allowed_token_ids=[3, 8, 96]),
}


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[LLM, LLM]]]:
    """Family -> (one process, two processes), all of them live at once."""
    before = rank_processes()
    found: dict[str, tuple[LLM, LLM]] = {}
    for family in FAMILIES:
        directory, _ = tiny_checkpoint(tmp_path_factory.mktemp(family), family)
        found[family] = (LLM(str(directory), **OPTIONS), LLM(str(directory), tensor_parallel_size=2, **OPTIONS))
    started = rank_processes() - before
    assert len(started) == len(FAMILIES)
    yield found
    for pair in found.values():
        for llm in pair:
            llm.close()
    assert all(is_gone(pid) for pid in started)


def run(llm: LLM, kind: str) -> list[RequestOutput]:
    return llm.generate(PROMPTS, PARAMS[kind], use_tqdm=False)


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_tokens(engines: dict[str, tuple[LLM, LLM]], family: str, kind: str) -> None:
    one, two = engines[family]
    for _ in range(2 if kind == "greedy" else 1):  # the second time from a warm prefix
        assert token_ids(run(two, kind)) == token_ids(run(one, kind))
    snapshot = settled_snapshot(two)
    assert snapshot.num_free_blocks == snapshot.num_blocks == two.num_blocks == 40
    assert snapshot.prefix_hit_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_scores(engines: dict[str, tuple[LLM, LLM]], family: str) -> None:
    for one, two in zip(*(run(llm, "scored") for llm in engines[family]), strict=True):
        assert one.prompt_logprobs is not None
        assert two.prompt_logprobs is not None
        pairs = list(zip(one.prompt_logprobs[1:], two.prompt_logprobs[1:], strict=True))
        pairs += list(zip(one.outputs[0].logprobs or (), two.outputs[0].logprobs or (), strict=True))
        assert pairs
        for first, second in pairs:
            assert first is not None
            assert second is not None
            assert {token: entry.logprob for token, entry in second.items()} == pytest.approx(
                {token: entry.logprob for token, entry in first.items()}, abs=1e-4
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_embeddings(engines: dict[str, tuple[LLM, LLM]], family: str) -> None:
    first, second = (llm.embed(PROMPTS, use_tqdm=False) for llm in engines[family])
    for one, two in zip(first, second, strict=True):
        assert two.embedding == pytest.approx(one.embedding, abs=1e-4)


def test_two_engines_at_once_do_not_meet(engines: dict[str, tuple[LLM, LLM]]) -> None:
    expected = {family: token_ids(run(one, "greedy")) for family, (one, _) in engines.items()}
    with ThreadPoolExecutor(4) as pool:
        jobs = [(family, pool.submit(run, two, "greedy")) for family, (_, two) in engines.items() for _ in range(2)]
        for family, job in jobs:
            assert token_ids(job.result(timeout=120)) == expected[family]
    assert expected["Qwen3"] != expected["Llama"]


def test_leaving_in_the_middle_leaves_nothing(engines: dict[str, tuple[LLM, LLM]]) -> None:
    one, two = engines["Qwen3"]
    stream = two.stream(PROMPTS[0], SamplingParams(max_tokens=40, ignore_eos=True))
    next(stream)
    stream.close()
    assert token_ids(run(two, "greedy")) == token_ids(run(one, "greedy"))
    wait_until(lambda: settled_snapshot(two).num_free_blocks == two.num_blocks)


def test_ranks_are_processes_that_a_terminal_does_not_reach(engines: dict[str, tuple[LLM, LLM]]) -> None:
    for pid in rank_processes():
        assert os.getsid(pid) == pid  # Ctrl-C goes to our session
        assert os.getpgid(pid) == pid
