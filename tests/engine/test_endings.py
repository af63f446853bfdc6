"""When a request ends, and with which reason. The comments name the reported case: C03, C06."""

from typing import Any

import pytest

from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import Sequence
from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import HashedTokens, LedgerRunner, ScriptedLogits, ScriptedTokens, drive

EOS, END_OF_TURN, STOP = 0, 19, 7
VOCABULARY = 20


def run(prompt: list[int], params: SamplingParams, script: list[int], mode: dict[str, Any]) -> Sequence:
    scheduler = Scheduler(4, 64, 32, 4, EOS, end_token_ids=[END_OF_TURN], **mode)
    seq = Sequence(prompt, sampling_params=params, request_id="it")
    scheduler.add_sequence(seq)
    drive(scheduler, LedgerRunner.for_scheduler(scheduler, choose=ScriptedTokens({"it": script}, lambda _: 5)))
    return seq


@pytest.mark.parametrize(
    ("params", "script", "tokens", "reason", "stop_reason"),
    [
        ({"max_tokens": 8}, [3, EOS], [3, EOS], "stop", None),
        ({"max_tokens": 8}, [3, END_OF_TURN], [3, END_OF_TURN], "stop", None),
        ({"max_tokens": 1}, [EOS], [EOS], "stop", None),  # an end token that is also the last one allowed
        ({"max_tokens": 1}, [3], [3], "length", None),
        ({"max_tokens": 3, "ignore_eos": True}, [EOS, END_OF_TURN, EOS], [EOS, END_OF_TURN, EOS], "length", None),
        ({"max_tokens": 8, "stop_token_ids": [STOP]}, [3, STOP], [3, STOP], "stop", STOP),
        ({"max_tokens": 8, "stop_token_ids": [4, STOP], "ignore_eos": True}, [EOS, STOP], [EOS, STOP], "stop", STOP),
        ({"max_tokens": 8, "stop_token_ids": [EOS], "ignore_eos": True}, [3, EOS], [3, EOS], "stop", EOS),
        ({"max_tokens": 8, "stop_token_ids": [EOS]}, [3, EOS], [3, EOS], "stop", None),
        # min_tokens counts the completion only, and holds back every kind of end but max_tokens
        ({"max_tokens": 8, "min_tokens": 3}, [EOS, END_OF_TURN, EOS], [EOS, END_OF_TURN, EOS], "stop", None),
        (
            {"max_tokens": 8, "min_tokens": 3, "stop_token_ids": [STOP]},
            [STOP, STOP, 3, STOP],
            [STOP, STOP, 3, STOP],
            "stop",
            STOP,
        ),
        ({"max_tokens": 3, "min_tokens": 3}, [EOS, EOS, 3], [EOS, EOS, 3], "length", None),
        ({"max_tokens": None, "max_model_length": 14}, [3] * 9, [3] * 4, "length", None),
        ({"max_tokens": None, "max_model_length": 13, "min_tokens": 9}, [EOS] * 9, [EOS] * 3, "length", None),
    ],
)
def test_the_first_condition_that_holds_ends_the_request(
    mode: Any, params: dict[str, Any], script: list[int], tokens: list[int], reason: str, stop_reason: int | None
) -> None:  # C03
    seq = run(list(range(1, 11)), SamplingParams(**params), script, mode)
    assert (seq.completion_token_ids, seq.finish_reason, seq.stop_reason) == (tokens, reason, stop_reason)


@pytest.mark.parametrize("end", [EOS, END_OF_TURN, STOP])
def test_a_runner_that_masks_end_tokens_gives_min_tokens_others_first(mode: Any, end: int) -> None:  # C03
    logits = [0.0] * VOCABULARY
    logits[end], logits[4] = 100.0, 50.0
    scheduler = Scheduler(4, 64, 32, 4, EOS, end_token_ids=[END_OF_TURN], **mode)
    params = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=8, stop_token_ids=[STOP])
    seq = Sequence(list(range(1, 11)), sampling_params=params)
    scheduler.add_sequence(seq)
    drive(scheduler, LedgerRunner.for_scheduler(scheduler, choose=ScriptedLogits(logits, [EOS, END_OF_TURN])))
    assert (seq.completion_token_ids, seq.finish_reason) == ([4, 4, end], "stop")


def test_zero_tokens_are_refused() -> None:  # C03
    with pytest.raises(InvalidRequestError, match="max_tokens=0 must be at least 1"):
        SamplingParams(max_tokens=0)


def test_a_model_without_eos_runs_to_its_limit(mode: Any) -> None:
    scheduler = Scheduler(4, 64, 32, 4, -1, **mode)
    seq = Sequence([1, 2, 3], sampling_params=SamplingParams(max_tokens=5))
    scheduler.add_sequence(seq)
    drive(scheduler, LedgerRunner.for_scheduler(scheduler))
    assert (seq.num_completion_tokens, seq.finish_reason) == (5, "length")


# --- seeds: every draw is used, once, in order -----------------------------------------------------------------------------

SEEDED = SamplingParams(temperature=1.0, seed=42, max_tokens=8, ignore_eos=True)
UNSEEDED = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)


def draw(prompts: dict[str, SamplingParams], *, num_blocks: int = 64, budget: int = 64, chunked: bool = True) -> Sequence:
    """Run requests named after their order; the one named "S" is returned."""
    scheduler = Scheduler(8, budget, num_blocks, 4, EOS, enable_chunked_prefill=chunked)
    sequences = {
        name: Sequence(list(range(number * 10 + 1, number * 10 + 8)), sampling_params=params, request_id=name)
        for number, (name, params) in enumerate(prompts.items())
    }
    for seq in sequences.values():
        scheduler.add_sequence(seq)
    logits = [0.1 * token for token in range(VOCABULARY)]
    drive(scheduler, LedgerRunner.for_scheduler(scheduler, choose=ScriptedLogits(logits)))
    return sequences["S"]


def test_a_seed_does_not_depend_on_company_chunks_or_preemption() -> None:  # C06
    alone = draw({"S": SEEDED})
    assert len(set(alone.completion_token_ids)) > 1
    crowd = {"S": SEEDED, "U": UNSEEDED}
    for other in (
        draw(crowd),
        draw({"U": UNSEEDED, "S": SEEDED}),
        draw({"S": SEEDED}, budget=4),
        draw(crowd, budget=4),
        draw({"S": SEEDED}, chunked=False),
        draw({"S": SEEDED}),
    ):
        assert other.completion_token_ids == alone.completion_token_ids
    for chunked in (True, False):
        put_out = draw({"U": UNSEEDED, "S": SEEDED}, num_blocks=5, chunked=chunked)
        assert put_out.num_preemptions > 0
        assert put_out.completion_token_ids == alone.completion_token_ids


def test_a_greedy_request_draws_nothing() -> None:  # C06
    scheduler = Scheduler(8, 64, 64, 4, EOS)
    choose = ScriptedLogits([0.0, 3.0, 1.0])
    scheduler.add_sequence(Sequence([1], sampling_params=SamplingParams(temperature=0.0, seed=42, max_tokens=3)))
    drive(scheduler, LedgerRunner.for_scheduler(scheduler, choose=choose))
    assert choose.num_streams == 0


def test_without_a_seed_each_request_draws_its_own() -> None:
    seeds = {Sequence([1]).sampling_seed for _ in range(20)}
    assert len(seeds) == 20
    assert Sequence([1], sampling_params=SamplingParams(seed=5)).sampling_seed == 5


def test_a_script_goes_on_after_its_end() -> None:
    choose = ScriptedTokens({"it": [1, 2]}, HashedTokens(10))
    assert choose(Sequence([1], request_id="it")) == 1
    assert choose(Sequence([1], request_id="other")) == HashedTokens(10).continue_prompt([1], 1)[0]
