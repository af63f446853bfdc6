"""One LLM, a scripted runner under it: what callers give, what they get back, and what is refused before it is queued."""

import math
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from waiting import wait_until

from minivllm_plugin import LLM, SamplingParams
from minivllm_plugin.errors import (
    ConfigError,
    ContextWindowExceededError,
    EngineClosedError,
    InvalidRequestError,
    QueueFullError,
    RequestFailedError,
)
from minivllm_plugin.testing import LedgerRunner, scripted_llm

FIVE = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture
def engine() -> Iterator[tuple[LLM, LedgerRunner]]:
    llm, runner = scripted_llm()
    yield llm, runner
    llm.close()


@pytest.fixture
def llm(engine: tuple[LLM, LedgerRunner]) -> LLM:
    return engine[0]


def tokens(llm: LLM, prompt: Any, params: SamplingParams = FIVE) -> list[int]:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids


def test_every_form_of_a_prompt_gives_the_same_tokens(llm: LLM) -> None:
    expected = tokens(llm, [1, 2, 3])
    assert tokens(llm, [[1, 2, 3]]) == tokens(llm, (1, 2, 3)) == tokens(llm, {"prompt_token_ids": [1, 2, 3]}) == expected
    assert (
        tokens(llm, [{"prompt_token_ids": [1, 2, 3]}])
        == tokens(llm, {"prompt_token_ids": [1, 2, 3], "cache_salt": "x"})
        == expected
    )


def test_outputs_have_vllm_names_and_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = [[9, 9], [1, 2, 3], [4], [5, 6, 7, 8, 9]]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (7, 1, 3, 2)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(output.outputs[0].token_ids) for output in outputs] == [7, 1, 3, 2]
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    assert all(output.finished and output.outputs[0].index == 0 and output.prompt is None for output in outputs)
    assert len({output.request_id for output in outputs}) == 4


def test_metrics_are_in_the_order_of_a_life(llm: LLM) -> None:
    metrics = llm.generate([1, 2, 3], FIVE, use_tqdm=False)[0].metrics
    assert metrics is not None
    moments = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert None not in moments
    assert moments == sorted(moments)  # type: ignore[type-var]
    assert metrics.time_in_queue is not None
    assert metrics.time_to_first_token is not None


def test_a_repeated_prompt_reports_its_cached_tokens(llm: LLM) -> None:
    prompt = list(range(1, 11))
    first = llm.generate(prompt, FIVE, use_tqdm=False)[0]
    second = llm.generate(prompt, FIVE, use_tqdm=False)[0]
    salted = llm.generate({"prompt_token_ids": prompt, "cache_salt": "mine"}, FIVE, use_tqdm=False)[0]
    assert [output.num_cached_tokens for output in (first, second, salted)] == [0, 8, 0]
    assert first.outputs[0].token_ids == second.outputs[0].token_ids == salted.outputs[0].token_ids


def test_streamed_tokens_equal_the_whole(llm: LLM) -> None:
    whole = tokens(llm, [3, 1, 2])
    deltas = list(llm.stream([3, 1, 2], FIVE))
    assert [token for delta in deltas for token in delta.token_ids] == whole
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"


def test_a_stream_that_lags_gets_the_rest_in_one_piece() -> None:
    gate = threading.Event()
    llm, _ = scripted_llm(gate=gate)
    with llm:
        stream = llm.stream([1, 2], FIVE)
        gate.set()
        wait_until(lambda: llm.snapshot().num_running == 0 and llm.snapshot().step >= 5)
        deltas = list(stream)
        assert len(deltas) == 1
        assert len(deltas[0].token_ids) == 5


def test_more_prompts_than_the_queue_holds_are_fed_as_room_appears() -> None:
    llm, _ = scripted_llm(options={"max_num_sequences": 2, "max_queue_size": 1})
    with llm:
        outputs = llm.generate([[n + 1] for n in range(40)], FIVE, use_tqdm=False)
        assert [output.prompt_token_ids for output in outputs] == [[n + 1] for n in range(40)]


def test_a_full_queue_refuses_and_recovers() -> None:
    gate = threading.Event()
    llm, _ = scripted_llm(gate=gate, options={"max_num_sequences": 1, "max_queue_size": 2})
    with llm:
        streams = [llm.submit([n + 1], FIVE) for n in range(3)]
        with pytest.raises(QueueFullError, match="3 requests are unfinished, the limit is 3"):
            llm.submit([9], FIVE)
        gate.set()
        assert [len(stream.result().outputs[0].token_ids) for stream in streams] == [5, 5, 5]
        assert llm.submit([9], FIVE).result().finished


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "empty"),
    ("", "empty"),
    ({"prompt_token_ids": []}, "empty"),
    ([-1], "-1"),
    ([1000], "0..999"),
    ([2**63], "0..999"),
    ([1, True], "True"),
    ([1, "2"], "'2'"),
    ([1.0], "1.0"),
    (None, "NoneType"),
    (5, "int"),
    (b"bytes", "bytes"),
    ({}, "prompt_token_ids"),
    ({"promt": "x"}, "promt"),
    ({"prompt_token_ids": [1], "cache_salt": ""}, "cache_salt"),
    ("text", "tokenizer"),
    (list(range(1, 257)), "256"),
]
BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"stop": ""}, "stop"),
    ({"stop": [""]}, "stop"),
    ({"stop": [1]}, "stop"),
    ({"stop_token_ids": [1000]}, "0..999"),
    ({"stop_token_ids": [-1]}, "-1"),
    ({"stop_token_ids": "1"}, "stop_token_ids"),
    ({"temperature": -1.0}, "-1"),
    ({"temperature": math.nan}, "nan"),
    ({"temperature": math.inf}, "inf"),
    ({"temperature": "hot"}, "hot"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.1}, "1.1"),
    ({"top_k": -5}, "-5"),
    ({"top_k": 1001}, "1001"),
    ({"top_k": 1.5}, "1.5"),
    ({"min_p": 2.0}, "min_p"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "-1"),
    ({"max_tokens": 10**6}, "256"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 10**6, "max_tokens": None}, "256"),
    ({"seed": -1}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"stop": "x"}, "tokenizer"),
    ({"ignore_eos": "yes"}, "ignore_eos"),
]


def refuse_while_another_runs(bad: Any) -> None:
    """``bad`` must raise ValueError at once; a running neighbour gets the tokens it gets alone, the pool stays whole."""
    gate = threading.Event()
    llm, runner = scripted_llm(gate=gate)
    with llm:
        good = llm.submit([7, 8, 9], FIVE)
        wait_until(runner.entered.is_set)
        with pytest.raises(ValueError) as refused:
            bad(llm)
        gate.set()
        mine = good.result().outputs[0].token_ids
        assert mine == tokens(llm, [7, 8, 9])
        wait_until(lambda: llm.snapshot().num_free_blocks == 64)
        assert llm.snapshot().num_waiting == llm.snapshot().num_running == 0
        raise refused.value


@pytest.mark.parametrize(("prompt", "names"), BAD_PROMPTS, ids=lambda value: repr(value)[:30])
def test_a_bad_prompt_is_refused_before_it_is_queued(prompt: Any, names: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        refuse_while_another_runs(lambda llm: llm.submit(prompt, FIVE))
    assert names in str(refused.value)


@pytest.mark.parametrize(("params", "names"), BAD_PARAMS, ids=lambda value: repr(value)[:40])
def test_a_bad_parameter_is_refused_before_it_is_queued(params: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        refuse_while_another_runs(lambda llm: llm.submit([1, 2], SamplingParams(**params)))
    assert names in str(refused.value)


@pytest.mark.parametrize("bad", [[[1, 2], []], [[1], [5000]], [[1], "text"], [[1], None]], ids=repr)
def test_one_bad_prompt_of_many_starts_none_of_them(engine: tuple[LLM, LedgerRunner], bad: Any) -> None:
    llm, runner = engine
    with pytest.raises(InvalidRequestError):
        llm.generate(bad, FIVE, use_tqdm=False)
    assert runner.num_calls == 0


@pytest.mark.parametrize("params", [[FIVE], [FIVE] * 3, "greedy", {"max_tokens": 4}, [1, 2]], ids=lambda value: repr(value)[:20])
def test_parameters_that_do_not_match_the_prompts_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"SamplingParams|sampling_params"):
        llm.generate([[1], [2]], params, use_tqdm=False)


def test_a_prompt_longer_than_the_window_says_both_numbers(llm: LLM) -> None:
    with pytest.raises(ContextWindowExceededError, match=r"300 tokens.*256"):
        llm.submit([1] * 300, FIVE)
    with pytest.raises(ContextWindowExceededError, match=r"leaves 6"):
        llm.submit([1] * 250, SamplingParams(max_tokens=7))
    assert len(tokens(llm, [1] * 250, SamplingParams(max_tokens=None, ignore_eos=True))) == 6
    assert len(tokens(llm, [1] * 255, SamplingParams(max_tokens=1, ignore_eos=True))) == 1


def test_a_live_request_id_is_refused_and_free_again_at_the_end() -> None:
    gate = threading.Event()
    llm, _ = scripted_llm(gate=gate)
    with llm:
        stream = llm.submit([1], FIVE, request_id="mine")
        with pytest.raises(InvalidRequestError, match="'mine' is in use"):
            llm.submit([2], FIVE, request_id="mine")
        gate.set()
        assert stream.result().request_id == "mine"
        assert llm.submit([2], FIVE, request_id="mine").result().finished


@pytest.mark.parametrize("timeout", [0, -1.0, math.nan])
def test_an_impossible_timeout_is_refused(llm: LLM, timeout: float) -> None:
    with pytest.raises(InvalidRequestError, match="timeout"):
        llm.submit([1], FIVE, timeout=timeout)


def test_a_row_without_finite_logits_fails_alone() -> None:
    from minivllm_plugin.engine.sequence import FAILED_TOKEN
    from minivllm_plugin.testing import HashedTokens, ScriptedTokens

    llm, _ = scripted_llm(choose=ScriptedTokens({"bad": [5, FAILED_TOKEN]}, HashedTokens(1000)))
    with llm:
        bad, good = llm.submit([1, 2], FIVE, request_id="bad"), llm.submit([1, 2], FIVE)
        with pytest.raises(RequestFailedError, match="'bad'"):
            bad.result()
        assert bad.output.outputs[0].token_ids == [5]
        assert len(good.result().outputs[0].token_ids) == 5
        assert llm.is_healthy


def test_close_fails_waiters_is_idempotent_and_refuses_newcomers() -> None:
    gate = threading.Event()
    llm, _ = scripted_llm(gate=gate)
    stream = llm.submit([1], SamplingParams(max_tokens=200, ignore_eos=True))
    threading.Timer(0.05, gate.set).start()
    llm.close()
    llm.close()
    with pytest.raises(EngineClosedError):
        stream.result()
        raise EngineClosedError("it ended before the engine closed")
    assert not llm.is_healthy
    with pytest.raises(EngineClosedError, match="closed"):
        llm.submit([1], FIVE)


def test_unknown_engine_options_are_named() -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs.*max_num_sequences"):
        LLM("smollm2-135m", max_num_seqs=4)
