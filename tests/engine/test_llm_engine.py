"""One step after another: what a step reports, what a failing runner leaves behind, and ``generate``. The case: A06."""

from collections.abc import Callable
from typing import Any

import pytest

from minivllm_plugin.engine.admission import Limits
from minivllm_plugin.engine.llm_engine import EngineStalledError, LLMEngine, Runner
from minivllm_plugin.engine.scheduler import Scheduler
from minivllm_plugin.engine.sequence import FAILED_TOKEN
from minivllm_plugin.errors import InvalidRequestError
from minivllm_plugin.sampling_parameters import SamplingParams
from minivllm_plugin.testing import HashedTokens, LedgerRunner, ScriptedTokens, check_pool

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


def engine_of(mode: dict[str, Any], encode: Callable[[str], list[int]] | None = None, **options: Any) -> LLMEngine:
    scheduler = Scheduler(4, 8, 32, 4, 0, **mode)
    runner: Runner = LedgerRunner.for_scheduler(scheduler, **options)
    return LLMEngine(scheduler, runner, Limits(1000, 100), encode)


def expected(prompt: list[int], num_tokens: int = 5) -> list[int]:
    return HashedTokens(1000).continue_prompt(prompt, num_tokens)


def test_progress_names_each_token_and_each_ending_once(mode: Any) -> None:
    engine = engine_of(mode)
    prompts = {"a": [1, 2, 3], "b": [4, 5, 6, 7, 8], "c": [9]}
    for name, prompt in prompts.items():
        engine.add_prompt(prompt, PARAMS, request_id=name)
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    endings: list[tuple[str, str]] = []
    while not engine.scheduler.is_finished():
        output = engine.step()
        assert 0 < output.num_tokens <= 8
        assert output.batch
        for progress in output.progress:
            assert progress.token_id is not None
            tokens[progress.request_id].append(progress.token_id)
            if progress.finish_reason:
                endings.append((progress.request_id, progress.finish_reason))
    assert tokens == {name: expected(prompt) for name, prompt in prompts.items()}
    assert sorted(endings) == [("a", "length"), ("b", "length"), ("c", "length")]


def test_a_step_with_nothing_to_do_has_the_same_shape(mode: Any) -> None:
    engine = engine_of(mode)
    for _ in range(2):
        output = engine.step()
        assert (output.batch, output.is_prefill, output.num_tokens, output.progress) == ((), False, 0, ())
    engine.add_prompt([1, 2, 3], PARAMS, request_id="a")
    engine.step()
    engine.abort("a")
    assert engine.step() == output


def test_a_step_that_only_fills_the_cache_reports_no_progress() -> None:
    engine = engine_of({"enable_chunked_prefill": True})
    engine.add_prompt(list(range(1, 21)), PARAMS)
    outputs = [engine.step() for _ in range(3)]
    assert [(output.num_tokens, len(output.progress)) for output in outputs] == [(8, 0), (8, 0), (4, 1)]
    assert all(output.is_prefill for output in outputs)
    assert not engine.step().is_prefill


def test_work_without_a_batch_is_an_error_and_not_a_spin(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(mode)
    engine.add_prompt([1, 2, 3], PARAMS)
    monkeypatch.setattr(engine.scheduler, "schedule", lambda: ([], False))
    with pytest.raises(EngineStalledError, match="1 waiting and 0 running requests, but none can be scheduled"):
        engine.step()


@pytest.mark.parametrize("call", [1, 2, 3, 5])
def test_after_a_failing_call_the_step_can_be_repeated(mode: Any, call: int) -> None:
    engine = engine_of(mode, fail_on_call=call)
    sequences = [engine.add_prompt(prompt, PARAMS) for prompt in ([1, 2, 3], [4, 5, 6, 7, 8])]
    failures = 0
    while not engine.scheduler.is_finished():
        try:
            engine.step()
        except RuntimeError as error:
            failures += 1
            assert str(error) == f"call {call} fails on purpose"  # noqa: PT017  # counted, not expected each time
        check_pool(engine.scheduler)
    assert failures == 1
    assert [seq.completion_token_ids for seq in sequences] == [expected([1, 2, 3]), expected([4, 5, 6, 7, 8])]


def test_a_runner_with_the_wrong_number_of_answers_changes_nothing(mode: Any) -> None:
    engine = engine_of(mode)
    seq = engine.add_prompt([1, 2, 3], PARAMS)
    honest = engine.runner
    engine.runner = Silent()
    with pytest.raises(ValueError, match="1 sequences but 0 tokens"):
        engine.step()
    engine.runner = honest
    while not seq.is_finished:
        engine.step()
    assert seq.completion_token_ids == expected([1, 2, 3])


class Silent:
    def run(self, seqs: list[Any], is_prefill: bool) -> list[int]:
        return []


def test_one_failing_row_ends_with_error_and_disturbs_nobody(mode: Any) -> None:
    engine = engine_of(mode, choose=ScriptedTokens({"bad": [7, 8, FAILED_TOKEN]}, HashedTokens(1000)))
    bad = engine.add_prompt([1, 2, 3], PARAMS, request_id="bad")
    good = engine.add_prompt([4, 5, 6], PARAMS, request_id="good")
    seen = []
    while not engine.scheduler.is_finished():
        seen += [progress for progress in engine.step().progress if progress.request_id == "bad"]
    assert [(progress.token_id, progress.finish_reason) for progress in seen] == [(7, None), (8, None), (None, "error")]
    assert (bad.finish_reason, bad.completion_token_ids) == ("error", [7, 8])
    assert good.completion_token_ids == expected([4, 5, 6])
    assert engine.scheduler.block_manager.num_free_blocks == 32


# --- generate ----------------------------------------------------------------------------------------------------------


def test_generate_keeps_the_order_of_the_prompts(mode: Any) -> None:
    prompts = [[n] * (n % 5 + 1) for n in range(1, 12)]
    assert engine_of(mode).generate(prompts, PARAMS) == [expected(prompt) for prompt in prompts]
    assert engine_of(mode).generate([], PARAMS) == []


def test_generate_runs_beside_requests_that_are_there_already(mode: Any) -> None:
    engine = engine_of(mode)
    other = engine.add_prompt([40, 41], SamplingParams(max_tokens=50, ignore_eos=True))
    assert engine.generate([[1, 2, 3]], PARAMS) == [expected([1, 2, 3])]
    assert not other.is_finished
    assert other.completion_token_ids == expected([40, 41], other.num_completion_tokens)


@pytest.mark.parametrize("bad", [[], [-1], None, [1] * 200])
def test_a_refused_prompt_leaves_the_others_of_its_call_out_too(mode: Any, bad: Any) -> None:
    engine = engine_of(mode)
    other = engine.add_prompt([40, 41], PARAMS)
    with pytest.raises(InvalidRequestError):
        engine.generate([[1, 2, 3], bad, [4]], PARAMS)
    assert [*engine.scheduler.waiting, *engine.scheduler.running] == [other]
    check_pool(engine.scheduler)


def test_a_failing_step_leaves_nothing_of_generate_behind(mode: Any) -> None:
    engine = engine_of(mode, fail_on_call=2)
    with pytest.raises(RuntimeError):
        engine.generate([[1, 2, 3], [4, 5]], PARAMS)
    assert engine.scheduler.is_finished()
    assert engine.scheduler.block_manager.num_free_blocks == 32
    assert engine.generate([[1, 2, 3]], PARAMS) == [expected([1, 2, 3])]


def test_text_needs_an_encoder(mode: Any) -> None:
    with pytest.raises(InvalidRequestError, match="no tokenizer; pass token ids"):
        engine_of(mode).generate(["hi"], PARAMS)
    engine = engine_of(mode, encode=lambda text: [ord(character) for character in text])
    assert engine.generate(["hi", [1, 2, 3]], PARAMS) == [expected([104, 105]), expected([1, 2, 3])]
    assert engine.generate("hi", PARAMS) == [expected([104, 105])]
    with pytest.raises(InvalidRequestError, match="empty"):
        engine.add_prompt("")
