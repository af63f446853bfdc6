"""Guessed tokens: the same completions with and without them, in fewer steps, and never where they could change something."""

from itertools import pairwise
from typing import Any

import pytest

from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import LLMEngine
from minivllm_plugin.engine.prompt_lookup import KEY, MOST_INDEXED, MOST_ROWS, PromptLookup
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import FAILED_TOKEN, Sequence
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.structured.params import StructuredOutputsParams
from minivllm_plugin.testing import HashedTokens, LedgerRunner, RepeatingTokens, ScriptedTokens, drive

VOCABULARY = 4  # 16 pairs of tokens: completions run into loops soon
EOS = 1000


def make_scheduler(speculative: int = 7, num_blocks: int = 64, block_size: int = 4, **options: Any) -> Scheduler:
    scheduler = Scheduler(8, 64, num_blocks, block_size, EOS, **{"enable_chunked_prefill": True, **options})
    scheduler.speculation = PromptLookup(speculative) if speculative else None
    return scheduler


def make_sequence(prompt: list[int], request_id: str = "a", **params: Any) -> Sequence:
    return Sequence(prompt, sampling_params=SamplingParams(**{"max_tokens": 40, **params}), request_id=request_id)


def run(scheduler: Scheduler, *sequences: Sequence, choose: Any = None) -> int:
    """To the end, with the ledger; how many steps it took."""
    for seq in sequences:
        scheduler.add_sequence(seq)
    choose = choose or RepeatingTokens(VOCABULARY)
    return len(drive(scheduler, LedgerRunner.for_scheduler(scheduler, choose=choose, can_speculate=True), 1000))


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("company", [1, 2, 5])
def test_the_tokens_are_the_same_and_the_steps_fewer(company: int, block_size: int, chunked: bool) -> None:
    completions, steps = [], []
    for speculative in (0, 7):
        scheduler = make_scheduler(speculative, 200, block_size, enable_chunked_prefill=chunked)
        sequences = [make_sequence([3, i % 4, 1 + i // 4], f"r{i}", max_tokens=60 + i) for i in range(company)]
        steps.append(run(scheduler, *sequences))
        completions.append([seq.completion_token_ids for seq in sequences])
        assert [seq.finish_reason for seq in sequences] == ["length"] * company
    assert completions[0] == completions[1]
    assert steps[1] < steps[0] / 2 if company == 1 else steps[1] <= steps[0]


def test_a_tiny_pool_gives_the_same_tokens() -> None:
    wanted = [RepeatingTokens(VOCABULARY).continue_prompt([3, i], 12) for i in range(4)]
    for num_blocks in range(7, 20):
        scheduler = make_scheduler(7, num_blocks, 2)
        sequences = [make_sequence([3, i], f"r{i}", max_tokens=12) for i in range(4)]
        run(scheduler, *sequences)
        assert [seq.completion_token_ids for seq in sequences] == wanted
        assert scheduler.block_manager.num_free_blocks == num_blocks


def test_what_was_computed_with_guesses_is_found_by_others() -> None:
    scheduler = make_scheduler(7, 100, 4)
    choose = RepeatingTokens(VOCABULARY)
    runner = LedgerRunner.for_scheduler(scheduler, choose=choose, can_speculate=True)
    first = make_sequence([3, 2, 1], "first", max_tokens=40)
    scheduler.add_sequence(first)
    drive(scheduler, runner, 100)
    follower = make_sequence(first.token_ids[:41], "second", max_tokens=3)
    scheduler.add_sequence(follower)
    drive(scheduler, runner, 100)
    assert follower.prompt_cached_tokens == 40
    assert follower.completion_token_ids == choose.continue_prompt(first.token_ids[:41], 3)


@pytest.mark.parametrize("ending", [{"max_tokens": 7}, {"max_model_length": 12}, {"stop_token_ids": (9,)}])
def test_it_ends_at_the_right_token_in_the_middle_of_guesses(ending: dict[str, Any]) -> None:
    script = [7, 8, 9, 7, 8, 9, 7, 8, 9, 7, 8, 9]
    prompt = [7, 8, 7, 8, 7]  # guesses 8, 7, 8, …: right only in part
    scheduler = make_scheduler()
    seq = make_sequence(prompt, **{"max_tokens": 100, **ending})
    run(scheduler, seq, choose=ScriptedTokens({"a": script}, HashedTokens(VOCABULARY)))
    if "stop_token_ids" in ending:
        assert (seq.completion_token_ids, seq.finish_reason, seq.stop_reason) == ([7, 8, 9], "stop", 9)
    else:
        assert (seq.completion_token_ids, seq.finish_reason) == (script[:7], "length")


def test_an_end_token_among_right_guesses_drops_what_follows() -> None:
    scheduler = make_scheduler()
    loop = [5, 6, EOS, 5, 6, EOS, 5, 6]
    seq = make_sequence(loop)
    scheduler.add_sequence(seq)
    batch, _ = scheduler.schedule()
    scheduler.postprocess(batch, [7])
    scheduler.abort("a")
    seq = make_sequence([*loop, 9], "b")
    engine = LLMEngine(
        scheduler,
        LedgerRunner.for_scheduler(scheduler, choose=lambda s: [9, 5, 6, EOS][s.num_completion_tokens % 4], can_speculate=True),
        Limits(2000, 500),
    )
    engine.add_prompt([9, 5, 6, EOS, 9, 5, 6, EOS], SamplingParams(max_tokens=50), request_id="c")
    records = []
    while not scheduler.is_finished():
        records += engine.step().progress
    assert [entry.token_id for entry in records] == [9, 5, 6, EOS]
    assert [entry.finish_reason for entry in records] == [None, None, None, "stop"]


def test_a_step_reports_each_of_its_tokens() -> None:
    scheduler = make_scheduler()
    runner = LedgerRunner.for_scheduler(scheduler, choose=lambda seq: [5, 6, 7][seq.num_tokens % 3], can_speculate=True)
    engine = LLMEngine(scheduler, runner, Limits(2000, 500))
    engine.add_prompt([5, 6, 7, 5, 6, 7], SamplingParams(max_tokens=20), request_id="a")
    steps = []
    while not scheduler.is_finished():
        steps.append(engine.step())
    assert max(len(step.progress) for step in steps) == MOST_ROWS
    assert sum(len(step.progress) for step in steps) == 20
    assert [entry.finish_reason for step in steps for entry in step.progress] == [None] * 19 + ["length"]
    speculation = scheduler.speculation
    assert speculation is not None
    assert 20 - len(steps) == speculation.statistics.accepted_tokens <= speculation.statistics.drafted_tokens


def test_a_row_that_fails_after_right_guesses_ends_its_request_there() -> None:
    scheduler = make_scheduler()
    seq = make_sequence([5, 6, 5, 6, 5])
    run(scheduler, seq, choose=ScriptedTokens({"a": [6, 5, 6, FAILED_TOKEN]}, HashedTokens(VOCABULARY)))
    assert (seq.completion_token_ids, seq.finish_reason) == ([6, 5, 6], "error")


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 4},
        {"bad_words_token_ids": ((3, 4),)},
        {"logprobs": 2},
        {"prompt_logprobs": 0},
        {"extra_args": {"some_processor": 1}},
        {"structured_outputs": StructuredOutputsParams(choice=["a", "b"])},
        {"thinking_token_budget": 4},
    ],
)
def test_nothing_is_guessed_where_the_choice_depends_on_what_was_chosen(params: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    run(scheduler, make_sequence([5, 6, 5, 6, 5], **params))
    assert scheduler.speculation is not None
    assert scheduler.speculation.statistics.drafted_tokens == 0


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9, "seed": 3}, {"stop": "x"}, {}])
def test_plain_requests_are_guessed_for(params: dict[str, Any]) -> None:
    scheduler = make_scheduler()
    run(scheduler, make_sequence([5, 6, 5, 6, 5], **params))
    assert scheduler.speculation is not None
    assert scheduler.speculation.statistics.accepted_tokens > 0


def test_nothing_is_guessed_while_somebody_waits_or_computes_a_prompt() -> None:
    scheduler = make_scheduler(7, 64, 4, enable_prefix_caching=False)
    runner = LedgerRunner.for_scheduler(scheduler, choose=lambda seq: [5, 6][seq.num_tokens % 2], can_speculate=True)
    scheduler.add_sequence(make_sequence([5, 6, 5, 6], "runs", max_tokens=200))
    waits = make_sequence([9] * 200, "waits", max_tokens=50)
    for step in range(12):
        if step == 4:
            scheduler.add_sequence(waits)
        batch, is_prefill = scheduler.schedule()
        drafted = any(seq.draft_token_ids for seq in batch)
        busy = step == 0 or (step >= 4 and waits.num_computed_tokens < 199)
        assert drafted != busy, step
        assert is_prefill == busy, step
        scheduler.postprocess(batch, runner.run(batch, is_prefill))


@pytest.mark.parametrize("company", range(1, 9))
def test_a_step_with_guesses_holds_few_rows(company: int) -> None:
    scheduler = make_scheduler()
    runner = LedgerRunner.for_scheduler(scheduler, choose=lambda seq: [5, 6][seq.num_tokens % 2], can_speculate=True)
    for index in range(company):
        scheduler.add_sequence(make_sequence([5, 6, 5, 6], f"r{index}", max_tokens=20 + 10 * index))
    batches = drive(scheduler, runner, 200)
    decodes = [batch for batch in batches if not batch.is_prefill]
    assert max(batch.num_tokens for batch in decodes) <= MOST_ROWS
    guessed = any(row.num_scheduled > 1 for batch in decodes for row in batch.rows)
    assert guessed  # those who are left at the end have room for guesses in any case


def test_wrong_guesses_become_rare() -> None:
    """Every token has been there before, and none is followed by what followed it last time."""
    rounds = [token for step in (1, 2, 3, 4, 5, 6) for token in [step * i % 13 for i in range(13)]]
    scheduler = make_scheduler(7, 200)
    seq = make_sequence(list(range(13)), max_tokens=len(rounds))
    steps = run(scheduler, seq, choose=ScriptedTokens({"a": rounds}, HashedTokens(VOCABULARY)))
    assert scheduler.speculation is not None
    statistics = scheduler.speculation.statistics
    assert statistics.accepted_tokens < len(rounds) // 3
    assert statistics.drafted_tokens < 1.2 * len(rounds)
    assert steps <= len(rounds) + 1


def places_of_guesses(num_tokens: int, right_at: int = 1 << 20) -> list[int]:
    """Tokens of a sequence before each step that computes guesses for it, once for each guess. Every token has been there before,
    and what follows is never what is guessed; except once, at ``right_at`` tokens or later."""
    scheduler = make_scheduler(7, 2000)
    seq = make_sequence(list(range(50)), max_tokens=num_tokens)
    scheduler.add_sequence(seq)
    places: list[int] = []
    while not scheduler.is_finished():
        batch, _ = scheduler.schedule()
        answer: int | list[int] = (seq.last_token + 1) % 50
        if drafts := seq.draft_token_ids:
            places += [seq.num_tokens] * len(drafts)
            answer = [(drafts[0] + 1) % 50]
            if right_at <= seq.num_tokens:
                answer, right_at = [drafts[0], *answer][: len(drafts) + 1], 1 << 20
        scheduler.postprocess(batch, [answer])
    return places


def rests_of(places: list[int]) -> list[int]:
    """Tokens without a guess between one guess and the next; a right one is two tokens before the next."""
    return [after - before - 1 for before, after in pairwise(places) if after - before > 2]


def test_fruitless_rests_become_longer() -> None:
    places = places_of_guesses(4000)
    assert rests_of(places)[:6] == [32, 64, 128, 256, 512, 512]
    assert len(places) < 0.025 * 4000  # rows that are computed for nothing


def test_a_right_guess_makes_rests_short_again() -> None:
    assert rests_of(places_of_guesses(1000, right_at=200)) == [32, 64, 128, 32, 64, 128, 256]


@pytest.mark.parametrize("company", [1, 2])
def test_a_long_text_is_looked_through_in_several_steps(company: int) -> None:
    scheduler = make_scheduler(7, 2 * 10_100 // 16, 16)
    scheduler.max_num_batched_tokens = 10_000
    sequences = [make_sequence([5, 6, 7] * 3333 + [5], f"r{index}", max_tokens=40) for index in range(company)]
    for seq in sequences:
        scheduler.add_sequence(seq)
    indexed, guessed = [0], []
    while not scheduler.is_finished():
        batch, is_prefill = scheduler.schedule()
        if not is_prefill:
            indexed.append(sum(seq.attachments[KEY].num_indexed for seq in sequences if not seq.is_finished))
            guessed.append(sum(len(seq.draft_token_ids) for seq in batch))
        answers = []
        for seq in batch:
            follows = [[5, 6, 7][(seq.num_tokens + ahead) % 3] for ahead in range(8)]
            answers.append([*seq.draft_token_ids, follows[len(seq.draft_token_ids)]])
        scheduler.postprocess(batch, answers)
    assert max(after - before for before, after in pairwise(indexed)) == MOST_INDEXED
    assert not guessed[0]
    assert sum(guessed) > 20
    assert all(seq.completion_token_ids == ([6, 7, 5] * 14)[:40] for seq in sequences)


def test_an_answer_that_does_not_go_with_the_drafts_is_refused() -> None:
    scheduler = make_scheduler()
    seq = make_sequence([5, 6, 5, 6, 5, 6])
    scheduler.add_sequence(seq)
    batch, _ = scheduler.schedule()
    scheduler.postprocess(batch, [5])
    batch, _ = scheduler.schedule()
    assert seq.draft_token_ids[:3] == [6, 5, 6]
    state = (list(seq.token_ids), seq.num_computed_tokens)
    for answer in ([], [9, 6], [6, 6, 6], [6, 5, 6] * 9, [6, -2]):
        with pytest.raises(ValueError, match="the runner returned"):
            scheduler.postprocess(batch, [answer])
        assert (seq.token_ids, seq.num_computed_tokens) == state
    scheduler.postprocess(batch, [[6, 5, 9]])
    assert seq.completion_token_ids == [5, 6, 5, 9]
    scheduler.check_integrity()


def test_guesses_of_a_batch_that_was_dropped_or_preempted_are_forgotten() -> None:
    scheduler = make_scheduler()
    seq = make_sequence([5, 6, 5, 6, 5, 6], max_tokens=20)
    scheduler.add_sequence(seq)
    runner = LedgerRunner.for_scheduler(scheduler, choose=lambda s: [5, 6][s.num_tokens % 2], can_speculate=True)
    batch, is_prefill = scheduler.schedule()
    scheduler.postprocess(batch, runner.run(batch, is_prefill))
    scheduler.schedule()
    assert seq.draft_token_ids
    scheduler.preempt(seq)
    assert not seq.draft_token_ids
    drive(scheduler, runner, 100)
    assert seq.completion_token_ids == [5, 6] * 10
