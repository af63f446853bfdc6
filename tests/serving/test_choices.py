"""Several completions of one prompt: shared blocks, seeds, ends of their own, and every way to leave early."""

import asyncio
import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import toy_tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from waiting import wait_until

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.errors import (
    EngineClosedError,
    InvalidRequestError,
    RequestAbortedError,
    RequestFailedError,
    RequestTimeoutError,
)
from minivllm_plugin.serving.tokenizer import Tokenizer
from minivllm_plugin.testing import EventRecorder, HashedLogits, LogitsRunner, scripted_llm

VOCAB = 50
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]  # two whole blocks of four, and a half
SAMPLED = SamplingParams(seed=100, max_tokens=6, ignore_eos=True)


def make(**options: Any) -> tuple[LLM, LogitsRunner]:
    llm, runner = scripted_llm(vocab_size=VOCAB, runner=LogitsRunner, **options)
    assert isinstance(runner, LogitsRunner)
    return llm, runner


def tokens(output: Any) -> list[list[int]]:
    return [completion.token_ids for completion in output.outputs]


def idle(llm: LLM) -> bool:
    snapshot = llm.snapshot()
    return snapshot.num_running == snapshot.num_waiting == snapshot.num_used_blocks == 0


@pytest.fixture
def llm() -> Iterator[LLM]:
    llm, _ = make()
    with llm:
        yield llm
        wait_until(lambda: idle(llm))


def test_choice_i_is_what_seed_plus_i_gives(llm: LLM) -> None:
    expected = [llm.generate(PROMPT, SAMPLED.replace(seed=100 + i), use_tqdm=False)[0].outputs[0].token_ids for i in range(4)]
    output = llm.generate(PROMPT, SAMPLED.replace(n=4), use_tqdm=False)[0]
    assert tokens(output) == expected
    assert len({tuple(one) for one in expected}) == 4
    assert [completion.index for completion in output.outputs] == [0, 1, 2, 3]
    assert output.prompt_token_ids == PROMPT


def test_the_largest_seed_goes_round(llm: LLM) -> None:
    output = llm.generate(PROMPT, SAMPLED.replace(seed=2**64 - 1, n=2), use_tqdm=False)[0]
    assert tokens(output)[1] == llm.generate(PROMPT, SAMPLED.replace(seed=0), use_tqdm=False)[0].outputs[0].token_ids


def test_without_a_seed_choices_differ_and_greedy_ones_are_equal(llm: LLM) -> None:
    free = llm.generate(PROMPT, SAMPLED.replace(seed=None, n=5), use_tqdm=False)[0]
    assert len({tuple(one) for one in tokens(free)}) > 1
    greedy = llm.generate(PROMPT, SAMPLED.replace(temperature=0.0, n=3), use_tqdm=False)[0]
    assert len({tuple(one) for one in tokens(greedy)}) == 1


@pytest.mark.parametrize("chunked", [True, False])
def test_the_prompt_is_computed_once_and_its_blocks_are_shared(chunked: bool) -> None:
    recorder = EventRecorder()
    llm, runner = make(options={"plugins": [recorder], "enable_chunked_prefill": chunked})
    with llm:
        output = llm.submit(PROMPT, SAMPLED.replace(n=4), request_id="r").result()
    assert output.num_cached_tokens == 0  # of the request, before it came
    ids = ["r", "r/choice-1", "r/choice-2", "r/choice-3"]
    firsts = {row.request_id: row for batch in reversed(runner.batches) for row in batch.rows}
    assert (firsts["r"].num_computed, firsts["r"].num_scheduled) == (0, 10)
    assert [(firsts[one].num_computed, firsts[one].num_scheduled) for one in ids[1:]] == [(8, 2)] * 3
    hits = {event.request_id: event.block_ids for event in recorder.block_events if type(event).__name__ == "BlocksHit"}
    assert set(hits) == set(ids[1:])
    assert len(set(hits.values())) == 1  # the very same two blocks
    assert len(hits["r/choice-1"]) == 2
    recorder.assert_consistent()
    assert all(recorder.requests[one].outcome.reason == "length" for one in ids)  # type: ignore[union-attr]


def test_without_a_prefix_cache_they_are_right_and_share_nothing(llm: LLM) -> None:
    other, _ = make(options={"enable_prefix_caching": False})
    with other:
        params = SAMPLED.replace(n=3)
        assert tokens(other.generate(PROMPT, params, use_tqdm=False)[0]) == tokens(
            llm.generate(PROMPT, params, use_tqdm=False)[0]
        )


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    num_blocks=st.sampled_from([4, 5, 6, 9, 64]),
    budget=st.sampled_from([1, 3, 10, 64]),
    width=st.integers(1, 4),
    num=st.integers(2, 5),
    length=st.integers(1, 6),
    chunked=st.booleans(),
)
def test_tiny_pools_preemption_and_chunks_change_nothing(
    num_blocks: int, budget: int, width: int, num: int, length: int, chunked: bool
) -> None:
    logits_of = HashedLogits(VOCAB)

    def greedy(seq: Sequence) -> list[int]:
        for _ in range(length):
            values = list(logits_of(seq))
            seq.append_token(values.index(max(values)))
        return seq.completion_token_ids

    budget = budget if chunked else max(budget, len(PROMPT) + length)
    options = {"max_num_batched_tokens": budget, "max_num_sequences": min(width, budget), "enable_chunked_prefill": chunked}
    llm, _ = make(num_blocks=num_blocks, options=options)
    with llm:
        params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True, n=num)
        outputs = llm.generate([PROMPT, PROMPT[:5]], params, use_tqdm=False)
        assert [tokens(output) for output in outputs] == [[greedy(Sequence(PROMPT))] * num, [greedy(Sequence(PROMPT[:5]))] * num]
        wait_until(lambda: idle(llm))


def test_every_choice_ends_for_its_own_reason() -> None:
    """By the seeds of its choices, one ends with the end token, others by a stop token or by length."""
    llm, _ = make(logits=lambda seq: [0.0, 0.0, 0.0] + [-50.0] * (VOCAB - 3))
    with llm:
        output = llm.generate(PROMPT, SamplingParams(seed=0, n=40, max_tokens=2, stop_token_ids=[1]), use_tqdm=False)[0]
    reasons = {(one.finish_reason, one.stop_reason) for one in output.outputs}
    assert reasons == {("stop", None), ("stop", 1), ("length", None)}
    for one in output.outputs:
        assert (one.token_ids[-1] == 0) == ((one.finish_reason, one.stop_reason) == ("stop", None))
        assert (one.token_ids[-1] == 1) == (one.stop_reason == 1)


@pytest.mark.parametrize("length", [1, 5])
def test_a_stream_tells_the_same_as_the_whole(llm: LLM, length: int) -> None:
    params = SAMPLED.replace(n=3, max_tokens=length, logprobs=1)
    whole = llm.generate(PROMPT, params, use_tqdm=False)[0]
    deltas = list(llm.stream(PROMPT, params))
    for completion in whole.outputs:
        mine = [delta for delta in deltas if delta.index == completion.index]
        assert [token for delta in mine for token in delta.token_ids] == completion.token_ids
        assert [entry for delta in mine for entry in delta.logprobs or ()] == completion.logprobs
        assert [delta.finish_reason for delta in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]

    async def read() -> list[Any]:
        return [delta async for delta in llm.stream(PROMPT, params)]

    again = asyncio.run(read())
    assert sorted((d.index, t) for d in again for t in d.token_ids) == sorted((d.index, t) for d in deltas for t in d.token_ids)
    assert tokens(asyncio.run(llm.stream(PROMPT, params).aresult())) == tokens(whole)


def test_those_who_wait_start_when_the_first_ends_with_its_first_token(llm: LLM) -> None:
    output = llm.generate(PROMPT, SAMPLED.replace(n=5, max_tokens=1), use_tqdm=False)[0]
    assert [len(one) for one in tokens(output)] == [1] * 5
    assert {one.finish_reason for one in output.outputs} == {"length"}


@pytest.mark.parametrize("by_id", [True, False])
def test_abort_before_the_prompt_is_computed_ends_all(by_id: bool) -> None:
    gate = threading.Event()
    recorder = EventRecorder()
    options = {"plugins": [recorder], "max_num_batched_tokens": 4, "max_num_sequences": 4}  # the prompt takes three steps
    llm, runner = make(gate=gate, options=options)
    with llm:
        stream = llm.submit(PROMPT, SAMPLED.replace(n=3), request_id="r")
        assert runner.entered.wait(20)
        llm.abort("r") if by_id else stream.close()
        gate.set()
        if by_id:
            with pytest.raises(RequestAbortedError):
                stream.result()
        assert {one.finish_reason for one in stream.output.outputs} == {"abort"}
        llm.submit([1], SAMPLED, request_id="later").result()  # the engine has seen the abort by then
        assert llm.submit(PROMPT, SAMPLED, request_id="r").result().finished  # the id is free again
    assert set(recorder.requests) == {"r", "later"}  # the others never came to be
    assert recorder.earlier[0].outcome.reason == "abort"  # type: ignore[union-attr]


def test_abort_while_all_run_ends_all(llm: LLM) -> None:
    stream = llm.submit(PROMPT, SAMPLED.replace(n=3, max_tokens=150), request_id="r")
    seen = set()
    for delta in stream:
        seen.add(delta.index)
        if seen == {0, 1, 2}:
            break
    llm.abort("r")
    with pytest.raises(RequestAbortedError):
        stream.result()
    assert {one.finish_reason for one in stream.output.outputs} == {"abort"}
    assert all(one.token_ids for one in stream.output.outputs)


def test_a_deadline_ends_all() -> None:
    gate = threading.Event()
    llm, runner = make(gate=gate)
    with llm:
        stream = llm.submit(PROMPT, SAMPLED.replace(n=3), timeout=0.05)
        assert runner.entered.wait(20)
        with pytest.raises(RequestTimeoutError):
            stream.result()
        gate.set()
        wait_until(lambda: idle(llm))


@pytest.mark.parametrize("failing", [0, 2])
@pytest.mark.parametrize("place", [0, 2])
def test_a_row_that_fails_fails_its_request_and_no_other(failing: int, place: int) -> None:
    hashed = HashedLogits(VOCAB)
    bad = "r" if failing == 0 else f"r/choice-{failing}"

    def logits(seq: Sequence) -> list[float]:
        is_bad = seq.request_id == bad and seq.num_completion_tokens == place and seq.prompt_token_ids == PROMPT
        return [math.nan] * VOCAB if is_bad else list(hashed(seq))

    recorder = EventRecorder()
    llm, _ = make(logits=logits, options={"plugins": [recorder]})
    with llm:
        other = llm.submit([1, 2], SAMPLED.replace(n=2))
        stream = llm.submit(PROMPT, SAMPLED.replace(n=4), request_id="r")
        with pytest.raises(RequestFailedError, match="not finite"):
            stream.result()
        assert stream.finished
        assert [len(one) for one in tokens(other.result())] == [6, 6]
        wait_until(lambda: idle(llm))
        assert llm.submit([3], SAMPLED, request_id="r").result().finished
    recorder.assert_consistent()


def test_an_engine_that_closes_tells_the_reader_once() -> None:
    gate = threading.Event()
    llm, runner = make(gate=gate)
    stream = llm.submit(PROMPT, SAMPLED.replace(n=3))
    assert runner.entered.wait(20)
    closing = threading.Thread(target=llm.close)
    closing.start()
    gate.set()
    with pytest.raises(EngineClosedError):
        stream.result()
    closing.join(20)
    assert not closing.is_alive()


def test_a_request_counts_once_in_the_queue_however_many_choices_it_has() -> None:
    from minivllm_plugin.errors import QueueFullError

    gate = threading.Event()
    llm, _ = make(gate=gate, options={"max_num_sequences": 1, "max_queue_size": 2})
    with llm:
        streams = [llm.submit(PROMPT, SAMPLED.replace(n=8)) for _ in range(3)]
        with pytest.raises(QueueFullError):
            llm.submit(PROMPT, SAMPLED)
        gate.set()
        assert [len(tokens(stream.result())) for stream in streams] == [8, 8, 8]
        wait_until(lambda: idle(llm))
        assert llm.submit(PROMPT, SAMPLED.replace(n=2)).result().finished


def test_an_id_that_another_request_s_choice_has_is_refused_and_harms_nobody(llm: LLM) -> None:
    first = llm.submit(PROMPT, SAMPLED.replace(n=2, max_tokens=100), request_id="r")
    next(delta for delta in first if delta.index == 1)
    with pytest.raises(InvalidRequestError):
        llm.submit(PROMPT, SAMPLED, request_id="r/choice-1").result()
    assert [len(one) for one in tokens(first.result())] == [100, 100]


def test_a_stop_string_ends_its_own_choice_alone(tmp_path: Any) -> None:
    tokenizer = Tokenizer.load(toy_tokenizers.save(toy_tokenizers.byte_per_token(), tmp_path))
    letters = [tokenizer.encode(letter)[0] for letter in "abc"]

    def logits(seq: Sequence) -> list[float]:
        return [9.0 if token in letters else -50.0 for token in range(300)]

    llm, _ = scripted_llm(vocab_size=300, eos=299, runner=LogitsRunner, logits=logits, tokenizer=tokenizer, num_blocks=200)
    with llm:
        params = SamplingParams(seed=3, n=6, max_tokens=12, stop=["ab"])
        plain = llm.generate(PROMPT, params.replace(stop=[]), use_tqdm=False)[0].outputs
        whole = llm.generate(PROMPT, params, use_tqdm=False)[0].outputs
        assert {one.finish_reason for one in whole} == {"stop", "length"}
        for before, after in zip(plain, whole, strict=True):
            assert after.text == before.text.split("ab")[0]
            assert after.stop_reason == ("ab" if "ab" in before.text else None)
            assert after.token_ids == before.token_ids[: len(after.text) + (2 if after.stop_reason else 0)]
        deltas = list(llm.stream(PROMPT, params))
        for completion in whole:
            assert "".join(d.text for d in deltas if d.index == completion.index) == completion.text
        wait_until(lambda: idle(llm))
