"""Malformed requests never reach the engine, and whoever runs beside them does not notice. The case: D03."""

from collections.abc import Callable
from typing import Any

import pytest

from minivllm_plugin.engine.admission import Limits, check_request
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import MAX_TOKEN_ID, Sequence
from minivllm_plugin.errors import ConfigError, ContextWindowExceededError, InvalidRequestError
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import HashedTokens, LedgerRunner, check_pool, drive

VOCABULARY = 100
WINDOW = 40
NAN, INFINITY = float("nan"), float("inf")


def engine(mode: dict[str, Any], num_blocks: int = 32) -> LLMEngine:
    scheduler = Scheduler(4, 64, num_blocks, 4, 0, **mode)
    return LLMEngine(scheduler, LedgerRunner.for_scheduler(scheduler, vocab_size=VOCABULARY), Limits(VOCABULARY, WINDOW))


BAD_PROMPTS: list[tuple[Any, str]] = [
    ([], "empty"),
    ("", "no tokenizer"),
    ([-1], "-1"),
    ([VOCABULARY], rf"{VOCABULARY} .*0\.\.{VOCABULARY - 1}"),
    ([2**63], str(2**63)),
    ([10**30], str(10**30)),
    (None, "None"),
    (5, "list of token ids, got 5"),
    (b"abc", "list of token ids"),
    ([1, None], "None"),
    ([1.0], r"1\.0"),
    ([True], "True"),
    (["1"], "'1'"),
    ([[1, 2]], r"\[1, 2\]"),
    ({1: 2}, "list of token ids"),
]

BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"stop": ""}, "non-empty"),
    ({"stop": [""]}, "non-empty"),
    ({"stop": ["a", 5]}, "5"),
    ({"stop": 5}, "5"),
    ({"stop": ["a"] * 65}, "65.*64"),
    ({"stop_token_ids": [-1]}, "-1"),
    ({"stop_token_ids": "5"}, "'5'"),
    ({"stop_token_ids": 5}, "5"),
    ({"stop_token_ids": [1.5]}, r"1\.5"),
    ({"temperature": -1}, "temperature=-1"),
    ({"temperature": NAN}, "nan"),
    ({"temperature": INFINITY}, "inf"),
    ({"temperature": "1"}, "'1'"),
    ({"temperature": None}, "None"),
    ({"top_p": 0}, "top_p=0"),
    ({"top_p": 1.1}, r"top_p=1\.1"),
    ({"top_p": NAN}, "nan"),
    ({"min_p": -0.1}, "min_p"),
    ({"min_p": 1.5}, "min_p"),
    ({"top_k": -5}, "top_k=-5"),
    ({"top_k": 2.5}, r"2\.5"),
    ({"max_tokens": -1}, "max_tokens=-1"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"max_tokens": 1.5}, r"1\.5"),
    ({"max_tokens": True}, "True"),
    ({"min_tokens": -1}, "min_tokens=-1"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9.*max_tokens=8"),
    ({"max_model_length": 0}, "max_model_length=0"),
    ({"seed": -1}, "seed=-1"),
    ({"seed": 2**64}, str(2**64)),
    ({"seed": "x"}, "'x'"),
    ({"ignore_eos": 1}, "ignore_eos"),
    ({"skip_special_tokens": None}, "skip_special_tokens"),
]

BAD_FOR_THE_MODEL: list[tuple[dict[str, Any], str]] = [
    ({"stop_token_ids": [VOCABULARY]}, str(VOCABULARY)),
    ({"top_k": VOCABULARY + 1}, str(VOCABULARY + 1)),
    ({"max_tokens": WINDOW}, rf"{WINDOW}.*leaves 37"),
    ({"max_tokens": None, "min_tokens": WINDOW}, str(WINDOW)),
]


def undisturbed(mode: dict[str, Any], attempt: Callable[[LLMEngine], object], message: str) -> None:
    """``attempt`` is refused while a neighbour runs; the neighbour, the queues and the pool do not notice."""
    it = engine(mode)
    neighbour = it.add_prompt([5, 6, 7, 8, 9], SamplingParams(max_tokens=6, ignore_eos=True))
    it.step()
    queues = (list(it.scheduler.waiting), list(it.scheduler.running), it.scheduler.block_manager.free_block_ids)
    with pytest.raises(ValueError, match=message) as caught:
        attempt(it)
    assert isinstance(caught.value, InvalidRequestError)
    assert queues == (list(it.scheduler.waiting), list(it.scheduler.running), it.scheduler.block_manager.free_block_ids)
    check_pool(it.scheduler)
    drive(it.scheduler, it.runner)
    assert neighbour.completion_token_ids == HashedTokens(VOCABULARY).continue_prompt([5, 6, 7, 8, 9], 6)


@pytest.mark.parametrize(("prompt", "message"), BAD_PROMPTS, ids=[repr(prompt)[:20] for prompt, _ in BAD_PROMPTS])
def test_bad_prompts(mode: Any, prompt: Any, message: str) -> None:
    undisturbed(mode, lambda it: it.add_prompt(prompt), message)


@pytest.mark.parametrize(("params", "message"), [*BAD_PARAMS, *BAD_FOR_THE_MODEL])
def test_bad_parameters(params: dict[str, Any], message: str) -> None:
    undisturbed({}, lambda it: it.add_prompt([1, 2, 3], SamplingParams(**params)), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": "high"}, "'high'"),
        ({"priority": None}, "None"),
        ({"priority": 0.5}, r"0\.5"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"cache_salt": b"x"}, "cache_salt"),
        ({"request_id": 5}, "request_id"),
        ({"request_id": ["a"]}, "request_id"),
        ({"sampling_params": {"temperature": 0}}, "sampling_params"),
    ],
)
def test_bad_options_fail_before_a_step_that_others_share(mode: Any, options: dict[str, Any], message: str) -> None:
    undisturbed({**mode, "policy": "priority"}, lambda it: it.add_prompt([1, 2, 3], **options), message)


def test_a_duplicate_id_is_refused(mode: Any) -> None:
    def twice(it: LLMEngine) -> None:
        it.scheduler.abort(it.add_prompt([1], request_id="a").request_id or "")
        it.add_prompt([1], request_id="a")
        try:
            it.add_prompt([2], request_id="a")
        finally:
            it.abort("a")

    undisturbed(mode, twice, "'a' is already in the engine")


def test_prompts_longer_than_the_window_or_the_pool(mode: Any) -> None:
    undisturbed(mode, lambda it: it.add_prompt([1] * WINDOW), rf"{WINDOW} tokens; the context window is {WINDOW}")
    undisturbed(mode, lambda it: it.add_prompt([1] * (WINDOW + 5)), f"{WINDOW + 5}")
    it = engine(mode, num_blocks=5)
    with pytest.raises(ContextWindowExceededError, match="needs 6 KV blocks of 4 tokens, the pool has 5"):
        it.add_prompt([1] * 21)
    it.add_prompt([1] * (WINDOW // 2), SamplingParams(max_tokens=1))
    check_pool(it.scheduler)


def test_the_longest_that_fits_is_accepted(mode: Any) -> None:
    it = engine(mode)
    seq = it.add_prompt([1] * (WINDOW - 1), SamplingParams(max_tokens=1, ignore_eos=True))
    unbounded = it.add_prompt([1] * 30, SamplingParams(max_tokens=None, ignore_eos=True, max_model_length=WINDOW + 100))
    drive(it.scheduler, it.runner)
    assert (seq.finish_reason, seq.num_tokens) == ("length", WINDOW)
    assert (unbounded.finish_reason, unbounded.num_tokens) == ("length", WINDOW)


# --- the same without an engine around the scheduler -------------------------------------------------------------------


@pytest.mark.parametrize("prompt", [[], None, 5, [-1], [2**63], [1.0], [None], [True], "ab", ["1"]])
def test_a_sequence_checks_its_own_tokens(prompt: Any) -> None:
    with pytest.raises(InvalidRequestError):
        Sequence(prompt)


@pytest.mark.parametrize(
    "options", [{"max_model_length": 0}, {"max_model_length": 1.5}, {"max_model_length": True}, {"priority": True}]
)
def test_a_sequence_checks_its_other_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(options))):
        Sequence([1], **options)


def test_the_largest_ids_work(mode: Any) -> None:
    scheduler = Scheduler(2, 64, 8, 2, 0, **mode)
    seq = Sequence([MAX_TOKEN_ID] * 5, sampling_params=SamplingParams(max_tokens=3))
    scheduler.add_sequence(seq)
    drive(scheduler, LedgerRunner.for_scheduler(scheduler, choose=lambda _: MAX_TOKEN_ID))
    assert seq.num_completion_tokens == 3


def test_the_prompt_is_copied() -> None:
    prompt = [1, 2, 3]
    seq = Sequence(prompt)
    prompt.append(4)
    assert seq.prompt_token_ids == [1, 2, 3]


def test_block_sizes_must_agree() -> None:
    scheduler = Scheduler(2, 64, 8, 4, 0)
    with pytest.raises(InvalidRequestError, match="block_size=8 of the sequence differs from the scheduler's 4"):
        scheduler.add_sequence(Sequence([1], 8))
    with pytest.raises(InvalidRequestError, match="block_size is not known yet"):
        _ = Sequence([1]).num_blocks
    assert scheduler.is_finished()


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((0, 64, 8, 4, 0), {}, "max_num_sequences must be an integer of at least 1, got 0"),
        ((2, 0, 8, 4, 0), {}, "max_num_batched_tokens"),
        ((2, 64, 0, 4, 0), {}, "max_cached_blocks"),
        ((2, 64, 8, 0, 0), {}, "block_size"),
        ((2, 64, 8, 4, None), {}, "eos"),
        ((2, 64.0, 8, 4, 0), {}, r"64\.0"),
        ((True, 64, 8, 4, 0), {}, "True"),
        ((2, 64, 8, 4, 0), {"policy": "lifo"}, "'fcfs' or 'priority', got 'lifo'"),
    ],
)
def test_impossible_schedulers_are_refused_by_name(arguments: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Scheduler(*arguments, **options)


def test_checks_change_nothing_and_accept_what_is_right() -> None:
    check_request([0, VOCABULARY - 1], SamplingParams(max_tokens=WINDOW - 2, top_k=VOCABULARY), Limits(VOCABULARY, WINDOW))
    check_request((1, 2), SamplingParams(max_tokens=None), Limits(VOCABULARY, WINDOW))
